"""`sbert-verify`: whether vectors made here, by a server, or in a file are those of an artifact."""
