"""The answers in OpenAI's formats, as a whole and as streams."""
