{{/* The number of a pool's shards to ask for: dict root, name, settings. A scaler's number is none of the chart's business,
     but a StatefulSet that loses the field `replicas` drops to 1 shard at once. So the number that it has is repeated.
     Empty where the cluster cannot be asked, as with `helm template`. */}}
{{- define "caravan.replicas" -}}
{{- if eq .settings.autoscaling.type "none" -}}
{{- .settings.replicas -}}
{{- else -}}
{{- $target := include "caravan.scaleTarget" . | fromYaml -}}
{{- with lookup $target.apiVersion $target.kind .root.Release.Namespace $target.name -}}{{- .spec.replicas -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* What an autoscaler of a pool scales: dict name, settings. */}}
{{- define "caravan.scaleTarget" -}}
{{- if gt (int .settings.hosts) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "caravan.hostsName" . }}
{{- else -}}
apiVersion: apps/v1
kind: StatefulSet
name: {{ .name }}
{{- end -}}
{{- end -}}

{{/* The routers of which there are at least and at most so many, as JSON. */}}
{{- define "caravan.routers" -}}
{{- $router := .Values.router -}}
{{- $scaling := $router.autoscaling -}}
{{- dict "least" (ternary $scaling.minReplicas $router.replicas $scaling.enabled) "most" (ternary $scaling.maxReplicas $router.replicas $scaling.enabled) | toJson -}}
{{- end -}}

{{/* A query of files/keda.yaml for one pool: dict root, pool, query, unit, the setting that has the threshold: "" is 1.

     Pools of one model share its load, or each would start shards for all of it. What the least shards of all pools do not
     carry fills one pool after another, by priority and then by name: a pool gets what those before it leave, up to its own
     most shards. Loads of a single pool are not cut, because the autoscaler has the same bounds. */}}
{{- define "caravan.demand" -}}
{{- $own := .pool -}}
{{- $unit := .unit -}}
{{- $ownThreshold := get $own.settings.autoscaling $unit | default 1 -}}
{{- $selector := printf "namespace=%q,model=%q" .root.Release.Namespace $own.served -}}
{{- $query := get (.root.Files.Get "files/keda.yaml" | fromYaml) .query | replace "$selector" $selector -}}
{{- $before := 0.0 -}}
{{- $others := 0 -}}
{{- range (include "caravan.pools" .root | fromJson).items -}}
{{- if eq .model $own.model -}}
{{- $threshold := get .settings.autoscaling $unit | default $ownThreshold -}}
{{- $before = addf $before (mulf .least $threshold) -}}
{{- if ne .pool $own.pool -}}
{{- $others = add1 $others -}}
{{- $ahead := subf .settings.autoscaling.priority $own.settings.autoscaling.priority -}}
{{- if or (gt $ahead 0.0) (and (eq $ahead 0.0) (lt .pool $own.pool)) -}}
{{- $before = addf $before (mulf (subf .most .least) $threshold) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $others -}}
{{- $room := mulf (subf $own.most $own.least) $ownThreshold -}}
{{- printf "clamp((%s) - %v, 0, %v) + %v" $query $before $room (mulf $own.least $ownThreshold) -}}
{{- else -}}
{{- $query -}}
{{- end -}}
{{- end -}}
