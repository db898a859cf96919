{{- define "quire.labels" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "quire.selector" -}}
{app.kubernetes.io/name: quire, app.kubernetes.io/instance: {{ .root.Release.Name }}, app.kubernetes.io/component: {{ .component }}}
{{- end }}

{{- define "quire.image" -}}
{{ .root.Values.image.registry }}{{ index .root.Values.image .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "quire.credentials" -}}
{{ .Values.existingSecrets.credentials | default (printf "%s-credentials" .Release.Name) }}
{{- end }}

{{- define "quire.tls" -}}
{{ .Values.existingSecrets.tls | default (printf "%s-tls" .Release.Name) }}
{{- end }}

{{/* A Secret of the cluster, as YAML: root, name. */}}
{{- define "quire.oldSecret" -}}
{{ lookup "v1" "Secret" (index . 0).Release.Namespace (index . 1) | toYaml }}
{{- end }}

{{/* The day on which the certificates were made: an upgrade in the last third of their 825 days makes new ones. Those that
an older chart made have no day, and their CA's key is lost: they stay as they are. */}}
{{- define "quire.certificatesMade" -}}
{{- $old := include "quire.oldSecret" (list . (include "quire.tls" .)) | fromYaml }}
{{- $made := dig "metadata" "annotations" "quire/made" "" $old }}
{{- $isDue := empty $old.data }}
{{- if $made }}
{{- $isDue = lt ($made | toDate "2006-01-02" | unixEpoch | int64) (now | dateModify "-13200h" | unixEpoch | int64) }}
{{- end }}
{{- $isDue | ternary (now | date "2006-01-02") $made }}
{{- end }}

{{- define "quire.keys" -}}
{{ .Values.existingSecrets.keys | default (printf "%s-keys" .Release.Name) }}
{{- end }}

{{- define "quire.redisUrl" -}}
{{- if .Values.redis.url -}}
{{ .Values.redis.url }}
{{- else -}}
rediss://quire@{{ .Release.Name }}-valkey:6379/0?ssl_ca_certs=/etc/quire/tls/ca.crt&ssl_certfile=/etc/quire/tls/service.crt&ssl_keyfile=/etc/quire/tls/service.key
{{- end -}}
{{- end }}

{{- define "quire.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "quire.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The settings of every service: root, prefix, port, metricsPort, settings. */}}
{{- define "quire.env" -}}
{{- $own := dict
  "REDIS_URL" (include "quire.redisUrl" .root)
  "REDIS_PASSWORD_FILE" "/etc/quire/credentials/redis-password"
  "REDIS_PATIENCE_S" 60
  "SECRET_FILE" "/etc/quire/credentials/secret"
  "HOST" "0.0.0.0"
  "PORT" .port
  "METRICS_PORT" .metricsPort
  "RUN_DIR" "/run/quire"
  "STOP_GRACE_S" .root.Values.stopGraceSeconds
  "TLS_CERT" "/etc/quire/tls/service.crt"
  "TLS_KEY" "/etc/quire/tls/service.key"
  "TLS_CA" "/etc/quire/tls/ca.crt" }}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: {{ .prefix }}_ADVERTISE_HOST, value: $(POD_IP)}
{{- range $name, $value := merge (dict) .settings $own }}
- {name: {{ $.prefix }}_{{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{/* The container gets SIGTERM when the pod's workers have left their pools. */}}
{{- define "quire.afterWorkers" -}}
lifecycle: {preStop: {exec: {command: [sh, -c, "while ls /pools/*/workers | grep -qE '^(prefill|decode)-'; do sleep 1; done"]}}}
{{- end }}

{{- define "quire.probes" -}}
startupProbe:
  httpGet: {path: /health, port: {{ .port }}}
  timeoutSeconds: 5
  periodSeconds: 5
  failureThreshold: 360
readinessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  timeoutSeconds: 5
  periodSeconds: 5
{{- end }}

{{- define "quire.mounts" -}}
- {name: run, mountPath: /run/quire}
- {name: tmp, mountPath: /tmp}
- {name: credentials, mountPath: /etc/quire/credentials, readOnly: true}
- {name: tls, mountPath: /etc/quire/tls, readOnly: true}
{{- if .Values.redis.tlsSecret }}
- {name: redis-tls, mountPath: /etc/quire/redis, readOnly: true}
{{- end }}
{{- end }}

{{- define "quire.volumes" -}}
- {name: run, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
- {name: tmp, emptyDir: {}}
- {name: credentials, secret: {secretName: {{ include "quire.credentials" . }}, defaultMode: 0440}}
- {name: tls, secret: {secretName: {{ include "quire.tls" . }}, defaultMode: 0440}}
{{- with .Values.redis.tlsSecret }}
- {name: redis-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- /* An endpoint of a ServiceMonitor, under the job's name in deploy/monitoring. */}}
{{- define "quire.endpoint" -}}
{port: {{ .port }}, interval: {{ .root.Values.monitoring.interval }}, relabelings: [{targetLabel: job, replacement: {{ .job }}}]}
{{- end }}
