"""Quality on labelled data: STS, pairs, retrieval and reranking."""
