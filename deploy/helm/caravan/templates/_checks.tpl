{{/* Refuse values that are wrong beyond what the schema checks. */}}
{{- define "caravan.check" -}}
{{- $values := .Values -}}
{{- $pools := (include "caravan.pools" . | fromJson).items -}}
{{- include "caravan.checkModels" . -}}
{{- include "caravan.checkAccess" . -}}
{{- include "caravan.checkSeveralRouters" . -}}
{{- if lt (int $values.router.shardGraceSeconds) (int $values.router.drainSeconds) -}}
{{- fail "router.shardGraceSeconds must be at least router.drainSeconds: a router that is replaced keeps its last shard for so long" -}}
{{- end -}}
{{- if and $values.tls.clientCaSecretName (eq $values.router.readiness "serving") -}}
{{- fail "router.readiness serving needs /readyz, which the kubelet cannot ask without a certificate of tls.clientCaSecretName: set auto" -}}
{{- end -}}
{{- $own := dict "root" . "component" "router" "path" "router" "container" "router" "settings" $values.router -}}
{{- $volumes := list "tmp" "mtls" "tls" "client-ca" "keys" "state" "api-token" "models" "cache" -}}
{{- $mounts := list "/tmp" "/etc/caravan/mtls" "/etc/caravan/tls" "/etc/caravan/client-ca" "/etc/caravan/keys" "/var/lib/caravan" "/models" "/var/cache/caravan" -}}
{{- $mounts = append $mounts "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- include "caravan.checkPod" (merge $own (dict "volumes" $volumes "mounts" $mounts "env" (list "POD_IP"))) -}}
{{- range $pools -}}
{{- $path := printf "models.%s.pools.%s" .model .pool -}}
{{- include "caravan.checkScaling" (dict "root" $ "path" $path "settings" .settings) -}}
{{- include "caravan.checkHosts" (dict "root" $ "path" $path "pool" .) -}}
{{- $own := dict "root" $ "component" "shard" "path" $path "container" "shard" "settings" .settings -}}
{{- $volumes := list "tmp" "model" "download-ca" "cache" "mtls" -}}
{{- $mounts := list "/tmp" "/models" "/var/cache/caravan" "/etc/caravan/mtls" -}}
{{- include "caravan.checkPod" (merge $own (dict "volumes" $volumes "mounts" $mounts "env" (ternary (list "POD_NAME" "GGML_NO_BACKTRACE") (list "POD_NAME") (gt (int .settings.hosts) 1)))) -}}
{{- $space := include "caravan.emptyDirBytes" (dict "settings" .settings "download" .source.download) | float64 -}}
{{- with get ((.settings.resources | default dict).limits | default dict) "ephemeral-storage" -}}
{{- if lt (include "caravan.number" . | float64) $space -}}
{{- fail (printf "%s.resources: limits.ephemeral-storage %v is less than the %dMi of the pod's emptyDirs: the node would evict it" $path . (divf $space 1048576 | ceil | int)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "caravan.checkModels" -}}
{{- $values := .Values -}}
{{- if and $values.onDemand.enabled (not $values.onDemand.claimName) -}}
{{- fail "onDemand needs claimName: a PersistentVolumeClaim with a folder of GGUF files" -}}
{{- end -}}
{{- if and $values.onDemand.enabled $values.router.autoscaling.enabled -}}
{{- fail "onDemand: each router would load models for itself: set router.autoscaling.enabled: false" -}}
{{- end -}}
{{- if and $values.defaultModel (not (hasKey $values.models $values.defaultModel)) -}}
{{- fail (printf "defaultModel: models has no %s" $values.defaultModel) -}}
{{- end -}}
{{- $taken := list -}}
{{- range $model, $spec := $values.models -}}
{{- $served := include "caravan.servedName" $spec -}}
{{- if has $served $taken -}}
{{- fail (printf "two models have the name %s, by which clients call them: set models.%s.alias" $served $model) -}}
{{- end -}}
{{- $taken = append $taken $served -}}
{{- with $spec.source.download -}}
{{- $path := printf "models.%s.source.download" $model -}}
{{- $names := list -}}
{{- range .files }}{{ $names = append $names (include "caravan.fileName" .) }}{{ end -}}
{{- if and .name $spec.file -}}
{{- fail (printf "models.%s.file: the files of %s.name have the names that the hub gives them: leave it out" $model $path) -}}
{{- end -}}
{{- if and .files (not (has $spec.file $names)) -}}
{{- fail (printf "%s.files: none is %s, which the model's shards load" $path $spec.file) -}}
{{- end -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.files" $path) "names" $names "own" list) -}}
{{- $own := list -}}
{{- if .tokenSecret }}{{ $own = append $own (ternary "HF_TOKEN" "DOWNLOAD_TOKEN" (hasKey . "name")) }}{{ end -}}
{{- if .name }}{{ $own = append $own "HF_HOME" }}{{ end -}}
{{- if and .name .tokenSecret (include "caravan.hub" . | hasPrefix "http://") -}}
{{- fail (printf "%s: the token would be sent in plaintext to %s" $path (include "caravan.hub" .)) -}}
{{- end -}}
{{- if .ca }}{{ $own = append $own "SSL_CERT_FILE" }}{{ end -}}
{{- if .s3 }}{{ $own = concat $own (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_REGION" "AWS_ENDPOINT_URL") }}{{ end -}}
{{- if .azure }}{{ $own = concat $own (list "AZURE_STORAGE_ACCOUNT" "AZURE_STORAGE_KEY" "AZURE_STORAGE_SAS_TOKEN" "AZURE_STORAGE_SERVICE_ENDPOINT") }}{{ end -}}
{{- $names := list -}}
{{- range .env }}{{ $names = append $names .name }}{{ end -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.env" $path) "names" $names "own" $own) -}}
{{- range .files -}}
{{- if and (hasPrefix "az://" .url) (not $spec.source.download.azure) -}}
{{- fail (printf "%s: %s needs azure.account" $path .url) -}}
{{- end -}}
{{- if and $spec.source.download.tokenSecret (hasPrefix "http://" .url) -}}
{{- fail (printf "%s: the token would be sent in plaintext to %s" $path .url) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pools := dict -}}
{{- range (include "caravan.pools" . | fromJson).items -}}
{{- $path := printf "models.%s.pools.%s" .model .pool -}}
{{- if hasKey $pools .name -}}
{{- fail (printf "%s and %s would both be called %s: rename a model or a pool" (get $pools .name) $path .name) -}}
{{- end -}}
{{- $_ := set $pools .name $path -}}
{{- end -}}
{{- end -}}

{{/* Who could reach what without a key or a certificate. */}}
{{- define "caravan.checkAccess" -}}
{{- $values := .Values -}}
{{- if and (eq $values.mtls.mode "off") (not $values.networkPolicy.enabled) -}}
{{- fail "anyone who reaches a shard commands it: set mtls.mode, or networkPolicy.enabled: true" -}}
{{- end -}}
{{- if and (eq $values.mtls.mode "secrets") (not (and $values.mtls.routerSecretName $values.mtls.shardSecretName)) -}}
{{- fail "mtls.mode secrets needs routerSecretName and shardSecretName" -}}
{{- end -}}
{{- if and $values.tls.clientCaSecretName (not $values.tls.secretName) -}}
{{- fail "tls.clientCaSecretName needs tls.secretName" -}}
{{- end -}}
{{- $public := list -}}
{{- if ne $values.service.type "ClusterIP" }}{{ $public = append $public (printf "service.type %s" $values.service.type) }}{{ end -}}
{{- if $values.ingress.enabled }}{{ $public = append $public "ingress" }}{{ end -}}
{{- if $values.gateway.enabled }}{{ $public = append $public "gateway" }}{{ end -}}
{{- if and $public (not (or $values.apiKeys.secretName $values.tls.clientCaSecretName $values.apiKeys.allowAnonymous)) -}}
{{- fail (printf "%s: anyone who reaches the router may use it: set apiKeys.secretName, or apiKeys.allowAnonymous: true" (join ", " $public)) -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (not $values.inferencePool.endpointPicker.name) (not $values.inferencePool.existing) -}}
{{- fail "inferencePool needs endpointPicker.name, or existing: the pool that the picker's own chart makes" -}}
{{- end -}}
{{- if and $values.inferencePool.enabled (gt (len $values.models) 1) -}}
{{- fail (printf "inferencePool: the endpoint picker reads one sample of each metric, so it would see one model only. models has %d: install a release for each, with gateway.headers if they share a host" (len $values.models)) -}}
{{- end -}}
{{- if and $values.inferencePool.enabled $values.tls.secretName -}}
{{- fail "inferencePool: Gateways speak plain HTTP to the members of an InferencePool: leave tls.secretName empty, and let the Gateway speak HTTPS" -}}
{{- end -}}
{{- if and $values.gateway.enabled (not $values.gateway.parentRefs) -}}
{{- fail "gateway needs parentRefs" -}}
{{- end -}}
{{- if and $values.gateway.backendTls.hostname (not $values.tls.secretName) -}}
{{- fail "gateway.backendTls needs tls.secretName: the router speaks plain HTTP" -}}
{{- end -}}
{{- $scraped := or $values.monitoring.serviceMonitor.enabled $values.monitoring.prometheusUrl -}}
{{- if and $values.inferencePool.enabled $values.networkPolicy.clients (not $values.networkPolicy.prometheus) -}}
{{- fail "networkPolicy.clients keeps the endpoint picker out, which reads the routers' metrics: name its pods in networkPolicy.prometheus" -}}
{{- end -}}
{{- if and $scraped $values.networkPolicy.clients (not $values.networkPolicy.prometheus) -}}
{{- fail "networkPolicy.clients keeps Prometheus out, without which there are no alarms and no autoscaling: name its pods in networkPolicy.prometheus" -}}
{{- end -}}
{{- if and $values.monitoring.serviceMonitor.enabled $values.tls.clientCaSecretName (not $values.monitoring.serviceMonitor.tlsConfig) -}}
{{- fail "tls.clientCaSecretName: the router answers Prometheus only with a certificate: set monitoring.serviceMonitor.tlsConfig" -}}
{{- end -}}
{{- end -}}

{{/* A shard belongs to one router, and a router keeps what it stores to itself. */}}
{{- define "caravan.checkSeveralRouters" -}}
{{- $routers := int (include "caravan.routers" . | fromJson).most -}}
{{- $scaling := .Values.router.autoscaling -}}
{{- if $scaling.enabled -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail "router.autoscaling.minReplicas is greater than maxReplicas" -}}
{{- end -}}
{{- if not (or $scaling.cpuUtilization $scaling.metrics) -}}
{{- fail "router.autoscaling needs cpuUtilization or metrics" -}}
{{- end -}}
{{- if eq .Values.router.state.type "claim" -}}
{{- fail "router.autoscaling: a router that is taken away would take what its clients have stored along: set router.state.type: none" -}}
{{- end -}}
{{- end -}}
{{- if gt $routers 1 -}}
{{- $pools := (include "caravan.pools" . | fromJson).items -}}
{{- range $model, $_ := .Values.models -}}
{{- $least := 0 -}}
{{- range $pools -}}
{{- if eq .model $model }}{{ $least = add $least .least }}{{ end -}}
{{- end -}}
{{- if lt (int $least) $routers -}}
{{- fail (printf "models.%s: %d routers need as many shards, because a shard belongs to one router, and its pools have at least %d: raise replicas or autoscaling.minReplicas, or lower %s" $model $routers (int $least) (ternary "router.autoscaling.maxReplicas" "router.replicas" $scaling.enabled)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.router.state.type "claim") (not .Values.sessionAffinity.enabled) -}}
{{- fail "router.state: routers do not share what they store, and each request would find another one: set sessionAffinity.enabled, or router.replicas: 1" -}}
{{- end -}}
{{- if and .Values.sessionAffinity.enabled .Values.inferencePool.enabled -}}
{{- fail "sessionAffinity: with inferencePool, the endpoint picker chooses the router of each request" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Dict root, path, settings. */}}
{{- define "caravan.checkScaling" -}}
{{- $scaling := .settings.autoscaling -}}
{{- if and (ne $scaling.type "keda") (or $scaling.triggers $scaling.scalingModifiers) -}}
{{- fail (printf "%s: autoscaling.triggers and scalingModifiers are keda's: set autoscaling.type" .path) -}}
{{- end -}}
{{- if and $scaling.zeroWhenIdle (or (ne $scaling.type "keda") (lt (int $scaling.minReplicas) 1)) -}}
{{- fail (printf "%s: autoscaling.zeroWhenIdle is keda's, and needs autoscaling.minReplicas of at least 1; with 0, a pool is without shards anyway" .path) -}}
{{- end -}}
{{- $names := list -}}
{{- range $scaling.triggers }}{{ if .name }}{{ $names = append $names .name }}{{ end }}{{ end -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.autoscaling.triggers" .path) "names" $names "own" (list "wanted" "requests" "kv-use")) -}}
{{- if ne $scaling.type "none" -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s: autoscaling.minReplicas is greater than maxReplicas" .path) -}}
{{- end -}}
{{- if and (eq $scaling.type "hpa") (lt (int $scaling.minReplicas) 1) -}}
{{- fail (printf "%s: an HPA cannot scale to zero: set autoscaling.minReplicas, or type: keda" .path) -}}
{{- end -}}
{{- if and (eq $scaling.type "keda") (not .root.Values.monitoring.prometheusUrl) -}}
{{- fail (printf "%s: autoscaling by keda needs monitoring.prometheusUrl" .path) -}}
{{- end -}}
{{- if gt (int $scaling.fallbackReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s: autoscaling.fallbackReplicas is greater than maxReplicas" .path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Shards of several hosts: dict root, path, pool. */}}
{{- define "caravan.checkHosts" -}}
{{- $settings := .pool.settings -}}
{{- if gt (int $settings.hosts) 1 -}}
{{- if not .root.Values.networkPolicy.enabled -}}
{{- fail (printf "%s.hosts: anyone who reaches a worker may read prompts and run code, also with mtls: set networkPolicy.enabled: true" .path) -}}
{{- end -}}
{{- if ne .root.Values.ipFamily "IPv4" -}}
{{- fail (printf "%s.hosts: llama.cpp's rpc-servers have IPv4 addresses only. ipFamily is %s" .path .root.Values.ipFamily) -}}
{{- end -}}
{{- if or (eq $settings.cache.type "claim") (.pool.source.download | default dict).storageClassName -}}
{{- fail (printf "%s.hosts: a group of hosts cannot have its own claims: use cache.type: emptyDir, and claimName for a download" .path) -}}
{{- end -}}
{{- if hasKey ($settings.flags | default dict) "rpc" -}}
{{- fail (printf "%s.hosts: the chart sets the flag rpc itself" .path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the API server would refuse after it has made other objects: dict root, path, component, container, settings, and
     the names of the chart's own volumes and env, and the paths of its mounts. */}}
{{- define "caravan.checkPod" -}}
{{- $path := .path -}}
{{- $resources := .settings.resources | default dict -}}
{{- range $name, $limit := $resources.limits -}}
{{- $request := get ($resources.requests | default dict) $name | default 0 -}}
{{- if gt (include "caravan.number" $request | float64) (include "caravan.number" $limit | float64) -}}
{{- fail (printf "%s.resources: limits.%s %v is below requests.%s %v" $path $name $limit $name $request) -}}
{{- end -}}
{{- end -}}
{{- $selector := include "caravan.selector" (dict "root" .root "component" .component "model" "m" "pool" "p") | fromYaml -}}
{{- $own := append (keys $selector) "app.kubernetes.io/version" -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.podLabels" $path) "names" (keys .settings.podLabels) "own" (concat $own (keys .root.Values.commonLabels))) -}}
{{- $own = concat $own (list "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- include "caravan.refuseTwice" (dict "path" "commonLabels" "names" (keys .root.Values.commonLabels) "own" $own) -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.labels" $path) "names" (keys .settings.labels) "own" (concat $own (keys .root.Values.commonLabels))) -}}
{{- $containers := concat .settings.initContainers .settings.extraContainers -}}
{{- range $key, $taken := dict "env" (list .settings.env .env) "extraVolumes" (list .settings.extraVolumes .volumes) "initContainers or extraContainers" (list $containers (list .container "fetch-model" "await-workers")) -}}
{{- $names := list -}}
{{- range index $taken 0 }}{{ $names = append $names .name }}{{ end -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.%s" $path $key) "names" $names "own" (index $taken 1)) -}}
{{- end -}}
{{- $paths := list -}}
{{- $known := .volumes -}}
{{- range .settings.extraVolumes }}{{ $known = append $known .name }}{{ end -}}
{{- range .settings.extraVolumeMounts -}}
{{- $paths = append $paths (trimSuffix "/" .mountPath) -}}
{{- if not (has .name $known) -}}
{{- fail (printf "%s.extraVolumeMounts: there is no volume %s: name it in extraVolumes" $path .name) -}}
{{- end -}}
{{- end -}}
{{- include "caravan.refuseTwice" (dict "path" (printf "%s.extraVolumeMounts" $path) "names" $paths "own" .mounts) -}}
{{- end -}}

{{/* Dict path, names, and own, names that the chart uses itself. */}}
{{- define "caravan.refuseTwice" -}}
{{- $path := .path -}}
{{- $own := .own -}}
{{- $seen := list -}}
{{- range .names -}}
{{- if has . $own -}}
{{- fail (printf "%s: the chart sets %s itself" $path .) -}}
{{- else if has . $seen -}}
{{- fail (printf "%s has %s twice" $path .) -}}
{{- end -}}
{{- $seen = append $seen . -}}
{{- end -}}
{{- end -}}
