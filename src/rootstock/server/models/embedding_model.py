"""An embedding model of the server. It has no KV cache, no chat and no tokens to sample."""

from __future__ import annotations

from dataclasses import dataclass

from rootstock.engine.embedding import EmbeddingEngine
from rootstock.pipeline.model import ServedModel
from rootstock.runtime.base import Embedder, EmbedderDescription


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """An embedding model as the server sees it. The caller starts and stops its engine."""

    name: str
    embedder: Embedder
    engine: EmbeddingEngine

    @property
    def description(self) -> EmbedderDescription:
        return self.embedder.description


AnyModel = ServedModel | EmbeddingModel
