"""`sbert-serve`: exported models over HTTP, for clients of OpenAI and TEI. See docs/serving.md."""
