{{/* The name of a file that is downloaded. */}}
{{- define "caravan.fileName" -}}
{{- default (base (urlParse .url).path) .name -}}
{{- end -}}

{{/* The folder of a download. */}}
{{- define "caravan.downloadFolder" -}}
{{- clean (printf "/models/%s" (default "" .folder)) -}}
{{- end -}}

{{/* The init container that fetches a model's files: dict root, settings, image, download. */}}
{{- define "caravan.fetchModel" -}}
{{- $folder := include "caravan.downloadFolder" .download -}}
- name: fetch-model
  image: {{ .image | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [caravan, pull]
  args:
    {{- with .download.name }}
    - {{ . | quote }}
    {{- end }}
    {{- range .download.files }}
    - --file
    - {{ .url | quote }}
    - {{ .sha256 | quote }}
    - {{ printf "%s/%s" $folder (include "caravan.fileName" .) | quote }}
    {{- end }}
  {{- $env := .download.env | default list }}
  {{- $token := ternary "HF_TOKEN" "DOWNLOAD_TOKEN" (hasKey .download "name") }}
  {{- with .download.tokenSecret }}
  {{- $key := dict "name" .name "key" (default "token" .key) }}
  {{- $env = prepend $env (dict "name" $token "valueFrom" (dict "secretKeyRef" $key)) }}
  {{- end }}
  {{- with .download.s3 }}
  {{- if .secretName }}
  {{- range $name := list "AWS_SECRET_ACCESS_KEY" "AWS_ACCESS_KEY_ID" }}
  {{- $key := dict "name" $.download.s3.secretName "key" $name }}
  {{- $env = prepend $env (dict "name" $name "valueFrom" (dict "secretKeyRef" $key)) }}
  {{- end }}
  {{- end }}
  {{- range $name, $value := dict "AWS_REGION" .region "AWS_ENDPOINT_URL" .endpoint }}
  {{- if $value }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end }}
  {{- end }}
  {{- end }}
  {{- with .download.azure }}
  {{- if .secretName }}
  {{- range $name := list "AZURE_STORAGE_SAS_TOKEN" "AZURE_STORAGE_KEY" }}
  {{- $key := dict "name" $.download.azure.secretName "key" $name "optional" true }}
  {{- $env = prepend $env (dict "name" $name "valueFrom" (dict "secretKeyRef" $key)) }}
  {{- end }}
  {{- end }}
  {{- range $name, $value := dict "AZURE_STORAGE_ACCOUNT" .account "AZURE_STORAGE_SERVICE_ENDPOINT" .endpoint }}
  {{- if $value }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end }}
  {{- end }}
  {{- end }}
  {{- with .download.ca }}
  {{- $env = prepend $env (dict "name" "SSL_CERT_FILE" "value" "/etc/caravan/download-ca/ca.crt") }}
  {{- end }}
  {{- if .download.name }}
  {{- $env = prepend $env (dict "name" "HF_HOME" "value" $folder) }}
  {{- end }}
  {{- with $env }}
  env: {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    requests: {cpu: 500m, memory: 128Mi}
    limits: {memory: 1Gi}
  securityContext: {{- include "caravan.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /models}
    {{- if .download.ca }}
    - {name: download-ca, mountPath: /etc/caravan/download-ca, readOnly: true}
    {{- end }}
{{- end -}}

{{/* The URL of the hub that a download by name asks. */}}
{{- define "caravan.hub" -}}
{{- $hub := "https://huggingface.co" -}}
{{- range .env }}{{ if eq .name "HF_ENDPOINT" }}{{ $hub = .value }}{{ end }}{{ end -}}
{{- $hub -}}
{{- end -}}

{{/* The ports that a download needs, as a JSON list: those of its files, and of the proxies in its variables. */}}
{{- define "caravan.downloadPorts" -}}
{{- $urls := list -}}
{{- $stores := dict "s3" (default "https://s3" (.s3 | default dict).endpoint) "az" (default "https://az" (.azure | default dict).endpoint) -}}
{{- range .files }}{{ $urls = append $urls (default .url (get $stores (urlParse .url).scheme)) }}{{ end -}}
{{- if .name }}{{ $urls = append $urls (include "caravan.hub" .) }}{{ end -}}
{{- range .env -}}
{{- if and (regexMatch "(?i)^(https?|all)_proxy$" .name) .value }}{{ $urls = append $urls .value }}{{ end -}}
{{- end -}}
{{- $ports := list -}}
{{- range $urls -}}
{{- $url := urlParse . -}}
{{- $port := trimPrefix ":" (regexFind ":[0-9]+$" $url.host) | int -}}
{{- $ports = append $ports (default (ternary 443 80 (eq $url.scheme "https")) $port) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}
