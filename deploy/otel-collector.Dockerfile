# The collector beside a wget: its own image has nothing that could tell that it is healthy.
FROM otel/opentelemetry-collector-contrib:0.159.0 AS collector
FROM busybox:1.37.0-musl
COPY --from=collector /otelcol-contrib /otelcol-contrib
USER 10001
ENTRYPOINT ["/otelcol-contrib"]
