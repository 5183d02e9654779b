{{/* A pool each of whose shards takes several hosts: the shard is the leader of a group of LeaderWorkerSet, and llama.cpp's
     rpc-servers are its workers. All take a pool of caravan.pools, with root and component. */}}
{{- define "caravan.shardsOfHosts" -}}
{{- $settings := .settings -}}
{{- $worker := merge (dict "component" "rpc") . }}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {{- include "caravan.workloadMetadata" (merge (dict "name" (include "caravan.hostsName" .)) .) | nindent 2 }}
spec:
  {{- with include "caravan.replicas" . }}
  replicas: {{ . }}
  {{- end }}
  # Workers start with their leader, which waits for them.
  startupPolicy: LeaderCreated
  networkConfig: {subdomainPolicy: Shared}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {maxUnavailable: 1, maxSurge: 0}
  leaderWorkerTemplate:
    size: {{ $settings.hosts }}
    # What a worker held is lost with it, so the whole group is a shard that is lost.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate: {{- include "caravan.shardPod" . | nindent 6 }}
    workerTemplate:
      metadata:
        labels: {{- include "caravan.podLabels" $worker | nindent 10 }}
        {{- with $settings.podAnnotations }}
        annotations: {{- toYaml . | nindent 10 }}
        {{- end }}
      spec:
        {{- include "caravan.podCommon" $worker | nindent 8 }}
        containers:
          - name: rpc-server
            image: {{ include "caravan.image" . | quote }}
            imagePullPolicy: {{ .root.Values.image.pullPolicy }}
            command: [caravan, rpc-server]
            args:
              - --address=0.0.0.0:50053
              {{- with include "caravan.threads" $settings }}
              - --threads={{ . }}
              {{- end }}
              {{- if not (or $settings.gpus $settings.resourceClaims) }}
              - --device=none
              {{- end }}
            ports:
              - name: rpc
                containerPort: 50053
            # It serves one connection at a time, so a probe that connects would wait for the shard to leave.
            readinessProbe:
              exec:
                command:
                  - python3
                  - -c
                  - |
                    import sys
                    rows = [line.split() for line in open("/proc/net/tcp")]
                    sys.exit(not any(row[1].endswith(":C385") and row[3] == "0A" for row in rows))
              periodSeconds: 5
              timeoutSeconds: 5
            resources: {{- include "caravan.shardResources" (dict "settings" (set (deepCopy $settings) "cache" (dict "type" "none")) "download" nil) | nindent 14 }}
            securityContext: {{- include "caravan.containerSecurity" $worker | nindent 14 }}
            volumeMounts:
              - {name: tmp, mountPath: /tmp}
        volumes:
          - name: tmp
            emptyDir: {sizeLimit: 1Gi}
{{- if and .root.Values.networkPolicy.enabled }}
---
# Who reaches a worker may read prompts and run code: only the pool's shards may.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}-workers
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "caravan.labels" $worker | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "caravan.selector" $worker | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - ports:
        - {port: rpc, protocol: TCP}
      from:
        - podSelector:
            matchLabels: {{- include "caravan.selector" . | nindent 14 }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}-leaders
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "caravan.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "caravan.selector" . | nindent 6 }}
  policyTypes: [Egress]
  egress:
    - ports:
        - {port: 53, protocol: UDP}
        - {port: 53, protocol: TCP}
    - ports:
        - {port: 50053, protocol: TCP}
      to:
        - podSelector:
            matchLabels: {{- include "caravan.selector" $worker | nindent 14 }}
{{- end }}
{{- if $settings.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}-workers
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "caravan.labels" $worker | nindent 4 }}
spec:
  maxUnavailable: {{ $settings.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "caravan.selector" $worker | nindent 6 }}
{{- end }}
{{- end -}}

{{/* Its name. The controller makes a Service that has it, beside the chart's, which has the leaders alone. */}}
{{- define "caravan.hostsName" -}}
{{- printf "%s-hosts" .name -}}
{{- end -}}

{{/* The addresses of a leader's workers, by the names that LeaderWorkerSet gives them. */}}
{{- define "caravan.workers" -}}
{{- $addresses := list -}}
{{- range $number := untilStep 1 (int .settings.hosts) 1 -}}
{{- $addresses = append $addresses (printf "$(POD_NAME)-%d.%s.%s.svc:50053" $number (include "caravan.hostsName" $) $.root.Release.Namespace) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* The init container of a leader: it ends once all workers listen. */}}
{{- define "caravan.awaitWorkers" -}}
- name: await-workers
  image: {{ include "caravan.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python3, -u, -c]
  args:
    - |
      import socket, sys, time
      for address in sys.argv[1].split(","):
          host, port = address.rsplit(":", 1)
          said = ""
          while True:
              try:
                  socket.create_connection((host, int(port)), timeout=5).close()
                  break
              except OSError as error:
                  if said != str(error):
                      print(f"waiting for {address}: {error}")
                  said = str(error)
                  time.sleep(1)
    - {{ include "caravan.workers" . | quote }}
  env:
    - name: POD_NAME
      valueFrom:
        fieldRef: {fieldPath: metadata.name}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 128Mi}
  securityContext: {{- include "caravan.containerSecurity" . | nindent 4 }}
{{- end -}}
