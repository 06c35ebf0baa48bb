"""A language model over words: embedding, LSTM, and a decoder that may share the embedding's weights."""

from __future__ import annotations

import torch
from torch import nn

Hidden = tuple[torch.Tensor, torch.Tensor]


class WordModel(nn.Module):
    """MXNet's ``RNNModel``: words [T, B] int64 and a hidden state in, scores [T, B, vocabulary] and the next state out.

    Args:
        vocabulary: number of words.
        embedding: size of an embedding.
        hidden: size of the LSTM's state.
        layers: of the LSTM.
        dropout: share of what is dropped between layers.
        tied: the decoder's weights are the embedding's (Press and Wolf 2016).

    Raises:
        ValueError: weights are tied and the sizes differ.
    """

    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, dropout: float = 0.5, tied: bool = False
    ) -> None:
        super().__init__()
        if tied and embedding != hidden:
            raise ValueError(f"tied weights need --emsize and --nhid to be equal; they are {embedding} and {hidden}")
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocabulary, embedding)
        self.rnn = nn.LSTM(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, words: torch.Tensor, state: Hidden) -> tuple[torch.Tensor, Hidden]:
        outputs, state = self.rnn(self.drop(self.encoder(words)), state)
        return self.decoder(self.drop(outputs)), state

    def begin(self, batch: int) -> Hidden:
        """Return the state before the first word."""
        shape = (self.rnn.num_layers, batch, self.rnn.hidden_size)
        return torch.zeros(shape), torch.zeros(shape)
