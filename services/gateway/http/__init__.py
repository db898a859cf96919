"""The OpenAI-compatible HTTP server: Starlette and uvicorn in the gateway's event loop."""
