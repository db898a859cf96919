"""OpenAI's Responses API: `/v1/responses`, without state; tools are functions of the client."""
