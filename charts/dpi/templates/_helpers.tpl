{{- define "dpi.name" -}}
{{- default .Release.Name .Values.fullnameOverride }}
{{- end }}

{{/* Values of labels and the like as text: Helm reads 5 and true as something else, which Kubernetes refuses. */}}
{{- define "dpi.texts" -}}
{{- $texts := dict }}
{{- range $key, $value := . }}
{{- $_ := set $texts $key (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}
{{- toYaml $texts }}
{{- end }}

{{- define "dpi.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.labels }}
{{ include "dpi.texts" . }}
{{- end }}
{{- end }}

{{/* All values that are not the chart's own, with an image. */}}
{{- define "dpi.spec" -}}
{{- $spec := omit (deepCopy .Values) "fullnameOverride" "labels" "annotations" "global" }}
{{- if not (dig "engine" "image" "" $spec) }}
{{- $image := dict "image" (printf "dpinference/engine:%s" .Chart.AppVersion) }}
{{- $_ := set $spec "engine" (merge $image (default dict $spec.engine)) }}
{{- end }}
{{- range $key, $value := $spec }}
{{- if kindIs "invalid" $value }}
{{- $_ := unset $spec $key }}
{{- end }}
{{- end }}
{{- toYaml $spec }}
{{- end }}
