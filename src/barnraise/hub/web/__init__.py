"""Views of a hub for people and tools: status page, Prometheus metrics, OpenAPI. They change nothing."""
