"""`sbert-serve`: exported models behind HTTP, for clients of OpenAI and of TEI. See docs/serving.md."""
