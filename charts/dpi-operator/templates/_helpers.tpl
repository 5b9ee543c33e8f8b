{{- define "dpi-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "dpi-operator.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "dpi-operator.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "dpi-operator.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "dpi-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dpi-operator.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Values of labels and the like as text: Helm reads 5 and true as something else, which Kubernetes refuses. */}}
{{- define "dpi-operator.texts" -}}
{{- $texts := dict }}
{{- range $key, $value := . }}
{{- $_ := set $texts $key (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}
{{- toYaml $texts }}
{{- end }}

{{- define "dpi-operator.labels" -}}
{{ include "dpi-operator.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: dpinference
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ include "dpi-operator.texts" . }}
{{- end }}
{{- end }}

{{- define "dpi-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "dpi-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "dpi-operator.image" -}}
{{- with .Values.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{/* Namespaces that are watched, as a JSON list; empty with scope cluster. */}}
{{- define "dpi-operator.namespaces" -}}
{{- if and .Values.watch.namespaces (ne .Values.watch.scope "namespaces") }}
{{- fail "watch.namespaces is given, but watch.scope is cluster, which watches all of them: set watch.scope=namespaces" }}
{{- end }}
{{- if eq .Values.watch.scope "namespaces" }}
{{- default (list .Release.Namespace) .Values.watch.namespaces | uniq | toJson }}
{{- else }}[]{{ end }}
{{- end }}

{{/* What the operator may do in a namespace that it watches: what it calls, and no more. */}}
{{- define "dpi-operator.rules" -}}
- apiGroups: [dpinference.dev]
  resources: [dataparallelinferences]
  verbs: [get, list, watch, patch]
- apiGroups: [dpinference.dev]
  resources: [dataparallelinferences/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- if .Values.integrations.inferencePools }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.integrations.podGroups }}
- apiGroups: [scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.integrations.podMonitors }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}

{{/* Secret with the webhook's certificate: cert-manager's, or the one given. */}}
{{- define "dpi-operator.webhookSecret" -}}
{{- if .Values.webhook.certManager.enabled }}
{{- include "dpi-operator.fullname" . }}-webhook-tls
{{- else }}
{{- required "webhook.enabled needs a certificate: set webhook.certManager.enabled, or webhook.secretName with webhook.caBundle" .Values.webhook.secretName }}
{{- end }}
{{- end }}
