{{/* A quantity of Kubernetes as a number: 500m is 0.5, 2Gi is 2147483648. */}}
{{- define "caravan.number" -}}
{{- $text := ternary (printf "%f" .) (toString .) (kindIs "float64" .) -}}
{{- $unit := regexFind "[a-zA-Z]+$" $text -}}
{{- $number := trimSuffix $unit $text | float64 -}}
{{- if has $unit (list "n" "u" "m") -}}
{{- divf $number (get (dict "n" 1000000000 "u" 1000000 "m" 1000) $unit) -}}
{{- else -}}
{{- range until (index (dict "" 0 "k" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) (trimSuffix "i" $unit | replace "K" "k")) -}}
{{- $number = mulf $number (ternary 1024 1000 (hasSuffix "i" $unit)) -}}
{{- end -}}
{{- printf "%f" $number -}}
{{- end -}}
{{- end -}}

{{/* The threads of a shard: the whole CPUs of its limit, or else of its request. It would otherwise start one for each
     core of the node. Empty without either. */}}
{{- define "caravan.threads" -}}
{{- $resources := .resources | default dict -}}
{{- $limits := $resources.limits | default dict -}}
{{- $requests := $resources.requests | default dict -}}
{{- with coalesce $limits.cpu $requests.cpu -}}
{{- max 1 (include "caravan.number" . | float64 | floor | int) -}}
{{- end -}}
{{- end -}}

{{/* The resources of a shard's container: those of its settings, with its GPUs, its claims, and the space of its emptyDirs,
     without which a full node evicts it first. Dict settings, download. */}}
{{- define "caravan.shardResources" -}}
{{- $settings := .settings -}}
{{- $resources := $settings.resources | default dict | deepCopy -}}
{{- $limits := $resources.limits | default dict -}}
{{- $requests := $resources.requests | default dict -}}
{{- if $settings.gpus -}}
{{- $limits = merge (dict $settings.gpuResource $settings.gpus) $limits -}}
{{- end -}}
{{- $bytes := include "caravan.emptyDirBytes" . | float64 -}}
{{- if and $bytes (not (hasKey $requests "ephemeral-storage")) (not (hasKey $limits "ephemeral-storage")) -}}
{{- $requests = merge (dict "ephemeral-storage" (printf "%dMi" (divf $bytes 1048576 | ceil | int))) $requests -}}
{{- end -}}
{{- $whole := dict -}}
{{- with $requests }}{{ $_ := set $whole "requests" . }}{{ end -}}
{{- with $limits }}{{ $_ := set $whole "limits" . }}{{ end -}}
{{- with $settings.resourceClaims -}}
{{- $claims := list -}}
{{- range . }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- $_ := set $whole "claims" $claims -}}
{{- end -}}
{{- toYaml $whole -}}
{{- end -}}

{{/* The bytes that a shard's cache and download may take of its node: dict settings, download. */}}
{{- define "caravan.emptyDirBytes" -}}
{{- $bytes := 0.0 -}}
{{- if eq .settings.cache.type "emptyDir" -}}
{{- $bytes = include "caravan.cacheSize" .settings.cache | include "caravan.number" | float64 -}}
{{- end -}}
{{- with .download -}}
{{- if not (or .storageClassName .claimName .nodePath) -}}
{{- $bytes = addf $bytes (include "caravan.number" .size | float64) -}}
{{- end -}}
{{- end -}}
{{- printf "%f" $bytes -}}
{{- end -}}

{{/* The size of a volume for saved prefixes, with room beside the files that the shard counts. */}}
{{- define "caravan.cacheSize" -}}
{{- printf "%dGi" (add 1 (mulf .gibibytes 1.1 | ceil | int)) -}}
{{- end -}}
