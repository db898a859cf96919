"""The OpenAI-compatible front door, on Starlette and uvicorn in the gateway's event loop."""
