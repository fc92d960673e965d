"""turftopic: an Engine as the encoder of a topic model."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from sklearn.feature_extraction.text import CountVectorizer
from turftopic import KeyNMF, SemanticSignalSeparation

from tests.sbert_infer.integrations.libraries.given import FEW, TEXTS, minilm, prompted, same

model = KeyNMF(4, encoder=minilm, random_state=7, vectorizer=CountVectorizer(stop_words="english"))
assert model.fit_transform(TEXTS).shape == (len(TEXTS), 4)
words = {word for _, topic in model.get_topics(top_k=10) for word, _ in topic}
assert words & {"pasta", "soup", "sauce", "bread", "fish", "onions", "pie"}, words
assert words & {"jazz", "piano", "violin", "guitar", "choir", "opera", "drum"}, words
same(SemanticSignalSeparation(2, encoder=prompted).encode_documents(FEW), prompted.encode(FEW))
