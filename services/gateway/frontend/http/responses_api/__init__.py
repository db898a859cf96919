"""OpenAI's Responses API: `/v1/responses`, without state and without tools."""
