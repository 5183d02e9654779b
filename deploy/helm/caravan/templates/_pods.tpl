{{/* The security context of pods or containers: dict root, settings, key. A pool's own entries win; null removes one. */}}
{{- define "caravan.securityContext" -}}
{{- $context := get .root.Values .key | default dict | deepCopy -}}
{{- range $name, $value := get .settings .key | default dict -}}
{{- $context = ternary (omit $context $name) (set $context $name $value) (kindIs "invalid" $value) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "caravan.serviceAccount" -}}
{{- default (ternary (include "caravan.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* What the pods of both components have in common: dict root, component, settings, and for shards model and pool. */}}
{{- define "caravan.podCommon" -}}
{{- $settings := .settings -}}
serviceAccountName: {{ include "caravan.serviceAccount" .root | quote }}
automountServiceAccountToken: false
# A Service called caravan would set CARAVAN_PORT, which is a flag.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- range $name := list "priorityClassName" "schedulerName" "runtimeClassName" "dnsPolicy" "dnsConfig" "nodeSelector" "tolerations" "affinity" "resourceClaims" }}
{{- with get $settings $name }}
{{ dict $name . | toYaml }}
{{- end }}
{{- end }}
{{- with include "caravan.securityContext" (dict "root" .root "settings" $settings "key" "podSecurityContext") | fromYaml }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := include "caravan.selector" . | fromYaml }}
{{- if gt (int (get $settings "hosts")) 1 }}
{{- /* The hosts of a shard are hosts of their own. */}}
{{- $selector = omit $selector "app.kubernetes.io/component" }}
{{- end }}
{{- $topology := list }}
{{- range $settings.topologySpreadConstraints }}
{{- $topology = append $topology .topologyKey }}
{{- end }}
{{- $spread := ne (get $settings "spreadOverNodes" | toString) "false" }}
{{- $spread = and $spread (not (has "kubernetes.io/hostname" $topology)) }}
{{- if or $spread $topology }}
topologySpreadConstraints:
  {{- if $spread }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- toYaml $selector | nindent 8 }}
  {{- end }}
  {{- $selector = dict "labelSelector" (dict "matchLabels" $selector) }}
  {{- range $settings.topologySpreadConstraints }}
  - {{- ternary . (merge (deepCopy $selector) .) (hasKey . "labelSelector") | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The security context of the chart's own containers: dict root, settings. */}}
{{- define "caravan.containerSecurity" -}}
{{- include "caravan.securityContext" (dict "root" .root "settings" .settings "key" "containerSecurityContext") -}}
{{- end -}}

{{/* How the kubelet asks a router: dict root, path. A router that demands certificates answers the kubelet no request. */}}
{{- define "caravan.routerProbe" -}}
{{- if .root.Values.tls.clientCaSecretName -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ ternary "HTTP" "HTTPS" (empty .root.Values.tls.secretName) }}}
{{- end -}}
{{- end -}}
