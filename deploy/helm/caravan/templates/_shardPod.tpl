{{/* The pods of a pool's shards: a pool of caravan.pools, with root and component. */}}
{{- define "caravan.shardPod" -}}
{{- $root := .root -}}
{{- $scope := . -}}
{{- $settings := .settings -}}
{{- $mtls := ne $root.Values.mtls.mode "off" -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq $root.Values.ipFamily "IPv6") -}}
{{- $image := include "caravan.image" . -}}
{{- $download := .source.download -}}
{{- $folder := get (coalesce .source.claim .source.image .source.download) "folder" -}}
{{- $flags := dict "json-output" true -}}
{{- with include "caravan.threads" $settings }}{{ $flags = set $flags "threads" (int .) }}{{ end -}}
{{- if or $settings.gpus $settings.resourceClaims }}{{ $flags = set $flags "gpu-layers" -1 }}{{ end -}}
{{- $flags = mergeOverwrite $flags $settings.flags -}}
metadata:
  labels: {{- include "caravan.podLabels" $scope | nindent 4 }}
  {{- with $settings.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "caravan.podCommon" $scope | nindent 2 }}
  # SIGTERM drains, and the shard exits when its router has taken everything. There is no preStop hook, because a
  # shard that waits in one would get new requests meanwhile.
  terminationGracePeriodSeconds: {{ add $settings.drainSeconds 30 }}
  {{- $hosts := int $settings.hosts }}
  {{- if or $settings.initContainers $download (gt $hosts 1) }}
  initContainers:
    {{- with $settings.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $download }}
    {{- include "caravan.fetchModel" (merge (dict "image" $image "download" $download) $scope) | nindent 4 }}
    {{- end }}
    {{- if gt $hosts 1 }}
    {{- include "caravan.awaitWorkers" $scope | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: shard
      image: {{ $image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - {{ printf "--address=%s:50051" $any | quote }}
        - {{ printf "--health-address=%s:50052" $any | quote }}
        - --shard-id=$(POD_NAME)
        {{- if gt $hosts 1 }}
        - {{ include "caravan.workers" $scope | printf "--rpc=%s" | quote }}
        {{- end }}
        {{- if .file }}
        - {{ printf "--model=/models/%s%s" (ternary (printf "%s/" $folder) "" (not (empty $folder))) .file | quote }}
        {{- else }}
        - {{ printf "--model=%s" $download.name | quote }}
        {{- end }}
        {{- with coalesce .alias (ternary "" .served (not (empty .file))) }}
        - {{ printf "--alias=%s" . | quote }}
        {{- end }}
        - --drain-timeout-s={{ $settings.drainSeconds }}
        {{- if $mtls }}
        - --certfile=/etc/caravan/mtls/tls.crt
        - --keyfile=/etc/caravan/mtls/tls.key
        - --ca-certs=/etc/caravan/mtls/ca.crt
        {{- else }}
        - --allow-plaintext=on
        {{- end }}
        {{- if ne $settings.cache.type "none" }}
        - --cache-dir=/var/cache/caravan
        - --cache-dir-space={{ $settings.cache.gibibytes }}
        {{- end }}
        {{- include "caravan.flags" $flags | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        {{- if gt $hosts 1 }}
        # A lost worker ends the shard at once.
        - {name: GGML_NO_BACKTRACE, value: "1"}
        {{- end }}
        {{- if not .file }}
        # The init container has asked the hub. What it got is used as it is.
        - {name: HF_HOME, value: {{ include "caravan.downloadFolder" $download }}}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        {{- with $settings.env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $settings.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: grpc
          containerPort: 50051
        - name: health
          containerPort: 50052
      startupProbe:
        grpc: {port: 50052}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ divf $settings.startupSeconds 5 | ceil | int }}
      readinessProbe:
        grpc: {port: 50052}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Fails when the shard has work but completes no step. Its requests run elsewhere by then.
      livenessProbe:
        grpc: {port: 50052, service: live}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 3
        terminationGracePeriodSeconds: 15
      resources: {{- include "caravan.shardResources" (dict "settings" $settings "download" $download) | nindent 8 }}
      securityContext: {{- include "caravan.containerSecurity" $scope | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model, mountPath: /models, readOnly: true}
        {{- if ne $settings.cache.type "none" }}
        - {name: cache, mountPath: /var/cache/caravan}
        {{- end }}
        {{- if $mtls }}
        - {name: mtls, mountPath: /etc/caravan/mtls, readOnly: true}
        {{- end }}
        {{- with $settings.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $settings.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    {{- with .source.claim }}
    - name: model
      persistentVolumeClaim: {claimName: {{ .name | quote }}, readOnly: true}
    {{- end }}
    {{- with .source.image }}
    - name: model
      image: {reference: {{ .reference | quote }}, pullPolicy: {{ default "IfNotPresent" .pullPolicy }}}
    {{- end }}
    {{- with $download }}
    {{- if .claimName }}
    - name: model
      persistentVolumeClaim: {claimName: {{ .claimName | quote }}}
    {{- else if .nodePath }}
    - name: model
      hostPath: {path: {{ .nodePath | quote }}, type: Directory}
    {{- else if not .storageClassName }}
    - name: model
      emptyDir: {sizeLimit: {{ .size }}}
    {{- end }}
    {{- with .ca }}
    - name: download-ca
      {{- if .configMapName }}
      configMap: {name: {{ .configMapName | quote }}, items: [{key: {{ default "ca.crt" .key | quote }}, path: ca.crt}]}
      {{- else }}
      secret: {secretName: {{ .secretName | quote }}, items: [{key: {{ default "ca.crt" .key | quote }}, path: ca.crt}]}
      {{- end }}
    {{- end }}
    {{- end }}
    {{- if eq $settings.cache.type "emptyDir" }}
    - name: cache
      emptyDir: {sizeLimit: {{ include "caravan.cacheSize" $settings.cache }}}
    {{- end }}
    {{- if $mtls }}
    - name: mtls
      secret: {secretName: {{ include "caravan.certificateSecret" $scope | quote }}, defaultMode: 0440}
    {{- end }}
    {{- with $settings.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
