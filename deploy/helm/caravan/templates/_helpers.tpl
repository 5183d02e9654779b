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
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
caravan/model: {{ . }}
{{- end }}
{{- with .pool }}
caravan/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "caravan.labels" -}}
{{ include "caravan.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end -}}

{{/* An image's name: dict root, settings. */}}
{{- define "caravan.image" -}}
{{- with .root.Values.image.registry -}}{{ . }}/{{- end -}}
{{ .settings.repository }}:{{ coalesce .settings.tag .root.Values.image.tag .root.Chart.AppVersion }}
{{- end -}}

{{/* Every pool with all its settings: a map with items, a list of model, file, source, pool, name, settings. */}}
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
{{- $least := ternary $settings.replicas $scaling.minReplicas (eq $scaling.type "none") -}}
{{- $pools = append $pools (dict "model" $model "file" $spec.file "source" $spec.source "pool" $pool "name" $name "settings" $settings "least" $least) -}}
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
{{- $readiness = ternary "serving" "listening" (gt (int $most) (int .Values.router.replicas)) -}}
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

{{- define "caravan.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "caravan.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What the pods of both components have in common: dict root, settings. */}}
{{- define "caravan.podCommon" -}}
automountServiceAccountToken: false
# A Service called caravan would set CARAVAN_PORT, which is a flag.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "caravan.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* Prefer nodes that have no pod of the same kind: the dict of caravan.selector. */}}
{{- define "caravan.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "caravan.selector" . | nindent 8 }}
{{- end -}}

{{/* Refuse values that the schema cannot tell are wrong. */}}
{{- define "caravan.check" -}}
{{- $values := .Values -}}
{{- if and $values.defaultModel (not (hasKey $values.models $values.defaultModel)) -}}
{{- fail (printf "defaultModel: models has no %s" $values.defaultModel) -}}
{{- end -}}
{{- if and (eq $values.mtls.mode "off") (not $values.networkPolicy.enabled) -}}
{{- fail "whoever reaches a shard commands it: set mtls.mode, or networkPolicy.enabled: true" -}}
{{- end -}}
{{- if and (eq $values.mtls.mode "secrets") (not (and $values.mtls.routerSecretName $values.mtls.shardSecretName)) -}}
{{- fail "mtls.mode secrets needs routerSecretName and shardSecretName" -}}
{{- end -}}
{{- if lt (int $values.router.shardGraceSeconds) (int $values.router.drainSeconds) -}}
{{- fail "router.shardGraceSeconds must be at least router.drainSeconds: a router that is replaced keeps its last shard for so long" -}}
{{- end -}}
{{- $files := list -}}
{{- range $model, $spec := $values.models -}}
{{- if has $spec.file $files -}}
{{- fail (printf "two models have the file name %s, by which clients call them" $spec.file) -}}
{{- end -}}
{{- $files = append $files $spec.file -}}
{{- end -}}
{{- range (include "caravan.pools" . | fromJson).items -}}
{{- $scaling := .settings.autoscaling -}}
{{- $path := printf "models.%s.pools.%s" .model .pool -}}
{{- if ne $scaling.type "none" -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s: autoscaling.minReplicas is greater than maxReplicas" $path) -}}
{{- end -}}
{{- if and (eq $scaling.type "hpa") (lt (int $scaling.minReplicas) 1) -}}
{{- fail (printf "%s: an HPA cannot scale to zero: set autoscaling.minReplicas, or type: keda" $path) -}}
{{- end -}}
{{- if and (eq $scaling.type "keda") (not $values.monitoring.prometheusUrl) -}}
{{- fail (printf "%s: autoscaling by keda needs monitoring.prometheusUrl" $path) -}}
{{- end -}}
{{- if and (eq (int $scaling.minReplicas) 0) (eq $values.router.readiness "serving") -}}
{{- fail (printf "%s scales to zero, where a router is never ready with router.readiness serving: set auto" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (not $values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool needs endpointPicker.name" -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) -}}
{{- fail "gateway needs parentRefs" -}}
{{- end -}}
{{- end -}}

{{/* The size of a volume for saved prefixes, with room beside the files that the shard counts. */}}
{{- define "caravan.cacheSize" -}}
{{- printf "%dGi" (add 1 (mulf .gibibytes 1.1 | ceil | int)) -}}
{{- end -}}
