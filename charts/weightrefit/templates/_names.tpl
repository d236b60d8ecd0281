{{- define "weightrefit.labels" -}}
app.kubernetes.io/name: weightrefit
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "weightrefit.selector" -}}
app.kubernetes.io/name: weightrefit
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- /* Of a map with repository, tag and digest, and the chart's version. */ -}}
{{- define "weightrefit.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .version }}
{{- end -}}
{{- end }}

{{- /* The injection settings, as `weightrefit inject --settings` takes them too. */ -}}
{{- define "weightrefit.injection" -}}
{{- $image := include "weightrefit.image" (dict "image" .Values.agent.image "version" .Chart.AppVersion) -}}
{{- dict
  "image" $image
  "imagePullPolicy" .Values.agent.image.pullPolicy
  "coordinator" (printf "weightrefit-operator.%s.svc:7443" .Release.Namespace)
  "audience" .Values.audience
  "tokenExpirationSeconds" (.Values.injection.tokenExpirationSeconds | int64)
  "profiles" .Values.injection.profiles | toYaml -}}
{{- end }}
