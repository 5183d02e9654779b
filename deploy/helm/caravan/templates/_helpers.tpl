{{- define "caravan.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component: dict root, component, and for shards model and pool. */}}
{{- define "caravan.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
caravan/model: {{ . | quote }}
{{- end }}
{{- with .pool }}
caravan/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Labels of pods: the same dict, with settings. */}}
{{- define "caravan.podLabels" -}}
{{ include "caravan.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with .settings }}
{{- with .podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Labels of objects: the dict of caravan.selector. */}}
{{- define "caravan.labels" -}}
{{ include "caravan.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of a Deployment or StatefulSet: dict root, component, settings, name, and for shards model and pool. */}}
{{- define "caravan.workloadMetadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "caravan.labels" . | nindent 2 }}
  {{- with .settings.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .settings.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image's name: dict root, settings. */}}
{{- define "caravan.image" -}}
{{- with .root.Values.image.registry -}}{{ . }}/{{- end -}}
{{ .settings.repository }}:{{ coalesce .settings.tag .root.Values.image.tag .root.Chart.AppVersion }}
{{- end -}}

{{/* The name by which clients call a model: the first alias, or its file's name. */}}
{{- define "caravan.servedName" -}}
{{- $download := .source.download | default dict -}}
{{- coalesce (.alias | default "" | splitList "," | first) .file ($download.name | default "" | trimPrefix "hf:") -}}
{{- end -}}

{{/* Every pool with all its settings: a map with items, a list of model, file, alias,
     served, source, pool, name, settings, and the least and most of its shards. */}}
{{- define "caravan.pools" -}}
{{- $pools := list -}}
{{- range $model, $spec := .Values.models -}}
{{- range $pool, $own := $spec.pools -}}
{{- $settings := mergeOverwrite (deepCopy $.Values.shard) (deepCopy ($own | default dict)) -}}
{{- $name := printf "%s-%s-%s" (include "caravan.fullname" $) $model $pool -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "the name %s has %d characters, and a StatefulSet may have 52: shorten models.%s.pools.%s or set fullnameOverride" $name (len $name) $model $pool) -}}
{{- end -}}
{{- $scaling := $settings.autoscaling -}}
{{- if and (gt (int $settings.hosts) 1) (gt (len $name) 46) -}}
{{- fail (printf "the name %s has %d characters, and with hosts it may have 46: shorten models.%s.pools.%s or set fullnameOverride" $name (len $name) $model $pool) -}}
{{- end -}}
{{- $least := ternary $settings.replicas (ternary 0 $scaling.minReplicas $scaling.zeroWhenIdle) (eq $scaling.type "none") -}}
{{- $most := ternary $settings.replicas $scaling.maxReplicas (eq $scaling.type "none") -}}
{{- $pools = append $pools (dict "model" $model "file" $spec.file "alias" $spec.alias "served" (include "caravan.servedName" $spec) "source" $spec.source "pool" $pool "name" $name "settings" $settings "least" $least "most" $most) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $pools | toJson -}}
{{- end -}}

{{/* Command line flags, one JSON string a line, from a map of names and values. */}}
{{- define "caravan.flags" -}}
{{- range $name, $value := . }}
{{- range (ternary $value (list $value) (kindIs "slice" $value)) }}
- {{ printf "--%s=%s" $name (include "caravan.flagValue" .) | toJson }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Numbers come as floats, and large ones would be printed like 2e+06. */}}
{{- define "caravan.flagValue" -}}
{{- if kindIs "bool" . -}}{{ ternary "on" "off" . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* The address on which programs listen: of all interfaces. */}}
{{- define "caravan.anyAddress" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* What a Service needs for IPv6. With IPv4, it gets what the cluster gives by default. */}}
{{- define "caravan.ipFamilies" -}}
{{- if eq .Values.ipFamily "IPv6" -}}
ipFamilyPolicy: SingleStack
ipFamilies: [IPv6]
{{- end -}}
{{- end -}}

{{/* Not empty if routers follow the API's EndpointSlices. With auto, they do where DNS is slow or late: caches keep the
     answer that a pool of no shards has no address, and groups of hosts have no minReadySeconds. */}}
{{- define "caravan.watches" -}}
{{- $watches := eq .Values.router.discovery "endpointSlices" -}}
{{- if eq .Values.router.discovery "auto" -}}
{{- range (include "caravan.pools" . | fromJson).items -}}
{{- if or (eq (int .least) 0) (gt (int .settings.hosts) 1) }}{{ $watches = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- ternary "true" "" $watches -}}
{{- end -}}

{{/* The name of the InferencePool that the routers are in; empty without one. */}}
{{- define "caravan.inferencePool" -}}
{{- if .Values.inferencePool.enabled -}}
{{- default (printf "%s-router" (include "caravan.fullname" .)) .Values.inferencePool.existing -}}
{{- end -}}
{{- end -}}

{{/* When a router is ready: listening or serving. */}}
{{- define "caravan.readiness" -}}
{{- $readiness := .Values.router.readiness -}}
{{- if eq $readiness "auto" -}}
{{- $most := 0 -}}
{{- range $model, $spec := .Values.models -}}
{{- $least := 0 -}}
{{- range (include "caravan.pools" $ | fromJson).items -}}
{{- if eq .model $model -}}{{- $least = add $least .least -}}{{- end -}}
{{- end -}}
{{- $most = max $most $least -}}
{{- end -}}
{{- $routers := include "caravan.routers" . | fromJson -}}
{{- $spare := gt (int $most) (int $routers.most) -}}
{{- $readiness = ternary "serving" "listening" (and $spare (not .Values.tls.clientCaSecretName)) -}}
{{- end -}}
{{- $readiness -}}
{{- end -}}

{{- define "caravan.shardHostname" -}}
{{- default (printf "%s-shard" (include "caravan.fullname" .)) .Values.mtls.shardHostname -}}
{{- end -}}

{{/* The name of the Secret with the certificate of a component: dict root, component. */}}
{{- define "caravan.certificateSecret" -}}
{{- if eq .root.Values.mtls.mode "cert-manager" -}}
{{- printf "%s-%s-mtls" (include "caravan.fullname" .root) .component -}}
{{- else -}}
{{- get .root.Values.mtls (printf "%sSecretName" .component) -}}
{{- end -}}
{{- end -}}
