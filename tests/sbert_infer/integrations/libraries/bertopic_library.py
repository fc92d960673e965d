"""BERTopic: topics of short texts; an Engine itself would silently be replaced by another model."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from bertopic import BERTopic
from bertopic.backend._utils import select_backend
from umap import UMAP

from sbert_infer.integrations.bertopic import SbertEmbedder
from tests.sbert_infer.integrations.libraries.given import (
    FEW,
    LABELS,
    MINILM,
    PROMPTED,
    TEXTS,
    minilm,
    pickled,
    prompted,
    same,
)

for embedder in (SbertEmbedder(PROMPTED), SbertEmbedder(prompted), pickled(SbertEmbedder(PROMPTED))):
    assert select_backend(embedder) is embedder
    same(embedder.embed_documents(FEW), prompted.encode(FEW))
    same(embedder.embed_words(FEW), prompted.encode(FEW))
named = SbertEmbedder(PROMPTED, default_prompt_name="document")
same(named.embed(FEW), prompted.encode(FEW, prompt_name="document"))

# Why this class exists. If it fails, BERTopic takes engines: say so in docs/libraries.md.
with patch("bertopic.backend._sentencetransformers.SentenceTransformerBackend") as another:
    select_backend(minilm, language="english")
another.assert_called_once_with("sentence-transformers/all-MiniLM-L6-v2")

umap = UMAP(n_neighbors=10, n_components=5, metric="cosine", min_dist=0.0, random_state=7, n_jobs=1)
topics = BERTopic(embedding_model=SbertEmbedder(MINILM), umap_model=umap, min_topic_size=20)
found, _ = topics.fit_transform(TEXTS)
members = {
    topic: Counter(label for label, of in zip(LABELS, found, strict=True) if of == topic) for topic in {*found} - {-1}
}
assert len(members) >= 3, topics.get_topic_info()
# By chance, a label has a quarter of each topic. How topics are cut differs with the CPU.
assert sum(max(labels.values()) for labels in members.values()) > 0.6 * sum(map(Counter.total, members.values())), (
    members
)
(nearest, *_), _ = topics.find_topics("shares, interest rates and the stock market", top_n=1)
assert members[nearest].most_common(1)[0][0] == "money", members
same(topics.embedding_model.embed(FEW), minilm.encode(FEW))
