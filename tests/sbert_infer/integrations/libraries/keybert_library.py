"""KeyBERT: keywords; an Engine itself would silently be replaced by another model."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from unittest.mock import patch

from keybert import KeyBERT
from keybert.backend._utils import select_backend

from sbert_infer.integrations.keybert import SbertEmbedder
from tests.sbert_infer.integrations.libraries.given import FEW, MINILM, PROMPTED, minilm, pickled, prompted, same

for embedder in (SbertEmbedder(PROMPTED), SbertEmbedder(prompted), pickled(SbertEmbedder(PROMPTED))):
    assert select_backend(embedder) is embedder
    same(embedder.embed(FEW), prompted.encode(FEW))

# Why this class exists. If it fails, KeyBERT takes engines: say so in docs/libraries.md.
with patch("keybert.backend._sentencetransformers.SentenceTransformerBackend") as another:
    select_backend(minilm)
another.assert_called_once_with("paraphrase-multilingual-MiniLM-L12-v2")

text = "The violin has four strings. A violin is played with a bow, and violinists tune it in fifths every day."
model = KeyBERT(SbertEmbedder(MINILM))
keywords = model.extract_keywords(text, top_n=3)
assert any("violin" in word for word, _ in keywords), keywords
documents, words = model.extract_embeddings([text])
same(documents, minilm.encode([text]))
scores = dict(model.extract_keywords(text, top_n=3, doc_embeddings=documents, word_embeddings=words))
assert scores == dict(keywords)
