#!/usr/bin/env python3
"""Write test cases of ONNX Runtime's own operators, with ONNX Runtime's results.

    python scripts/contrib_cases.py crates/cli/tests/contrib      # needs numpy, onnx, onnxruntime

Every case is a folder as those of ONNX's node tests: a model of one node, inputs and outputs.
The test `onnx_nodes` of crate cli runs them on every device.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

BATCH, TOKENS, HEADS, WIDTH = 2, 5, 3, 4
HIDDEN = HEADS * WIDTH
DOMAIN = "com.microsoft"


def results(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """ONNX Runtime's outputs."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, given)


class Cases:
    """Collects cases in a folder; the seed makes them the same in every run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.random = np.random.default_rng(7)

    def floats(self, *shape: int) -> np.ndarray:
        return self.random.uniform(-1, 1, shape).astype(np.float32)

    def model(
        self,
        op: str,
        inputs: list[np.ndarray | None],
        outputs: int,
        fixed: tuple[int, ...],
        domain: str,
        skip: tuple[int, ...],
        **attributes: object,
    ) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """A model of one node, and what it is given."""
        names = ["" if value is None else f"x{i}" for i, value in enumerate(inputs)]
        results = ["" if i in skip else f"y{i}" for i in range(outputs)]
        node = helper.make_node(op, names, results, domain=domain, **attributes)
        infos, constants = [], []
        for i, value in enumerate(inputs):
            if value is None:
                continue
            if i in fixed:
                constants.append(numpy_helper.from_array(value, names[i]))
                continue
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            infos.append(helper.make_tensor_value_info(names[i], kind, value.shape))
        wanted = [name for name in results if name]
        types = [TensorProto.INT32 if n in self.integers else TensorProto.FLOAT for n in wanted]
        types = [self.types.get(n, kind) for n, kind in zip(wanted, types, strict=True)]
        pairs = zip(wanted, types, strict=True)
        out = [helper.make_tensor_value_info(n, t, None) for n, t in pairs]
        graph = helper.make_graph([node], op, infos, out, constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        if domain == "ai.onnx.ml":
            opsets.append(helper.make_opsetid(domain, 3))
        given = {names[i]: v for i, v in enumerate(inputs) if v is not None and i not in fixed}
        return helper.make_model(graph, opset_imports=opsets, ir_version=9), given

    def add(
        self,
        name: str,
        op: str,
        inputs: list[np.ndarray | None],
        outputs: int = 1,
        fixed: tuple[int, ...] = (),
        domain: str = DOMAIN,
        skip: tuple[int, ...] = (),
        like: list[np.ndarray | None] | None = None,
        unread: tuple[int, ...] = (),
        **attributes: object,
    ) -> None:
        """A case. Inputs `fixed` are initializers, outputs `skip` are absent. `like` are inputs
        that give the same result, for a form that ONNX Runtime has no kernel for on a CPU. Outputs
        `unread` are absent from the case only: ONNX Runtime needs them to compute the others."""
        hidden = skip + unread
        model, given = self.model(op, inputs, outputs, fixed, domain, hidden, **attributes)
        known, fed = self.model(op, inputs, outputs, fixed, domain, skip, **attributes)
        if like is not None:
            known, fed = self.model(op, like, outputs, fixed, domain, skip, **attributes)
        numbers = [i for i in range(outputs) if i not in skip]
        pairs = zip(numbers, results(known, fed), strict=True)
        self.save(name, model, [(given, [value for i, value in pairs if i not in unread])])

    def save(
        self,
        name: str,
        model: onnx.ModelProto,
        sets: list[tuple[dict[str, np.ndarray], list[np.ndarray]]],
    ) -> None:
        folder = self.folder / f"test_{name}"
        for number, (given, expected) in enumerate(sets):
            data = folder / f"test_data_set_{number}"
            data.mkdir(parents=True)
            for kind, values in (("input", list(given.values())), ("output", expected)):
                for i, value in enumerate(values):
                    tensor = numpy_helper.from_array(np.asarray(value))
                    (data / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())
        onnx.save(model, folder / "model.onnx")

    def text(self, name: str, graph: str, sets: list[dict[str, np.ndarray]]) -> None:
        """A model in ONNX's text form, with several sets of inputs."""
        header = '<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
        model = onnx.parser.parse_model(header + graph)
        self.save(name, model, [(given, results(model, given)) for given in sets])

    integers: tuple[str, ...] = ()
    types: dict[str, int] = {}


def attention(cases: Cases) -> None:
    f = cases.floats
    x, w, b = f(BATCH, TOKENS, HIDDEN), f(HIDDEN, 3 * HIDDEN), f(3 * HIDDEN)
    lengths = np.array([3, 5], np.int32)
    raw = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], np.int32)
    square = (cases.random.uniform(size=(BATCH, TOKENS, TOKENS)) < 0.7).astype(np.int32)
    square[:, :, 0] = 1
    past = f(2, BATCH, HEADS, 2, WIDTH)
    long = np.array([[1] * 7, [0, 1, 1, 1, 1, 0, 1]], np.int32)
    bias = f(1, HEADS, TOKENS, TOKENS)
    weights = {"fixed": (1, 2), "num_heads": HEADS}
    cases.add("attention", "Attention", [x, w, b], **weights)
    cases.add("attention_scale", "Attention", [x, w, b], scale=0.3, **weights)
    cases.add("attention_lengths", "Attention", [x, w, b, lengths], **weights)
    cases.add("attention_mask", "Attention", [x, w, b, raw], **weights)
    cases.add("attention_mask_3d", "Attention", [x, w, b, square], **weights)
    cases.add("attention_causal", "Attention", [x, w, b], unidirectional=1, **weights)
    cases.add("attention_bias", "Attention", [x, w, b, None, None, bias], **weights)
    cases.add("attention_past", "Attention", [x, w, b, None, past], outputs=2, **weights)
    cases.add(
        "attention_past_causal_mask", "Attention", [x, w, b, long, past], outputs=2,
        unidirectional=1, **weights,
    )
    sizes = [HIDDEN, HIDDEN, 2 * HIDDEN]
    w, b = f(HIDDEN, sum(sizes)), f(sum(sizes))
    cases.add("attention_value_size", "Attention", [x, w, b], qkv_hidden_sizes=sizes, **weights)


def multi_head_attention(cases: Cases) -> None:
    f, op = cases.floats, "MultiHeadAttention"
    q, k, v = f(BATCH, TOKENS, HIDDEN), f(BATCH, 4, HIDDEN), f(BATCH, 4, 2 * HIDDEN)
    b = f(4 * HIDDEN)
    mask = np.array([[1, 0, 1, 1], [1, 1, 1, 1]], np.int32)
    lengths = np.array([2, 4], np.int32)
    bias = f(BATCH, 1, TOKENS, 4)
    heads = {"num_heads": HEADS}
    cases.add("mha", op, [q, k, v], **heads)
    cases.add("mha_bias", op, [q, k, v, b], fixed=(3,), **heads)
    cases.add("mha_mask", op, [q, k, v, None, mask], **heads)
    cases.add("mha_lengths", op, [q, k, v, None, lengths], **heads)
    cases.add("mha_attention_bias", op, [q, k, v, None, None, bias], scale=0.25, **heads)
    packed = f(BATCH, TOKENS, HEADS, 3, WIDTH)
    flat = [packed[:, :, :, i].reshape(BATCH, TOKENS, HIDDEN) for i in range(3)]
    cases.add("mha_packed", op, [packed], like=flat, **heads)
    packed = f(BATCH, 4, HEADS, 2, WIDTH)
    flat = [packed[:, :, :, i].reshape(BATCH, 4, HIDDEN) for i in range(2)]
    cases.add("mha_packed_kv", op, [q, packed], like=[q, *flat], **heads)
    heads_k, heads_v = f(BATCH, HEADS, 6, WIDTH), f(BATCH, HEADS, 6, WIDTH)
    cases.add("mha_cross", op, [q, heads_k, heads_v], **heads)
    k, v = f(BATCH, TOKENS, HIDDEN), f(BATCH, TOKENS, HIDDEN)
    past = [f(BATCH, HEADS, 3, WIDTH), f(BATCH, HEADS, 3, WIDTH)]
    cases.add("mha_past", op, [q, k, v, None, None, None, *past], outputs=3, **heads)
    cases.add("mha_causal", op, [q, k, v], unidirectional=1, **heads)
    cases.add(
        "mha_past_causal", op, [q, k, v, None, None, None, *past], outputs=3, unidirectional=1,
        **heads,
    )


def group_query_attention(cases: Cases) -> None:
    f, op = cases.floats, "GroupQueryAttention"
    heads, groups, width = 4, 2, 16
    attributes = {"num_heads": heads, "kv_num_heads": groups}
    cos, sin = f(16, width // 2), f(16, width // 2)

    def tensors(tokens: int) -> list[np.ndarray]:
        return [f(BATCH, tokens, n * width) for n in (heads, groups, groups)]

    last = np.full((BATCH,), TOKENS - 1, np.int32)
    total = np.array([TOKENS], np.int32)
    none = [f(BATCH, groups, 0, width)] * 2
    prompt = [*tensors(TOKENS), *none, last, total]
    fixed = {"fixed": (7, 8), "outputs": 3, **attributes}
    cases.add("gqa_prompt", op, prompt, outputs=3, **attributes)
    cases.add("gqa_prompt_without_past", op, [*prompt[:3], None, None, last, total], outputs=3,
              **attributes)
    cases.add("gqa_rotary", op, [*prompt, cos, sin], do_rotary=1, **fixed)
    cases.add("gqa_rotary_interleaved", op, [*prompt, cos, sin], do_rotary=1,
              rotary_interleaved=1, **fixed)
    packed = f(BATCH, TOKENS, (heads + 2 * groups) * width)
    cases.add("gqa_packed", op, [packed, None, None, *none, last, total, cos, sin], do_rotary=1,
              **fixed)
    past = [f(BATCH, groups, 6, width), f(BATCH, groups, 6, width)]
    last, total = np.array([6, 6], np.int32), np.array([7], np.int32)
    cases.add("gqa_token", op, [*tensors(1), *past, last, total, cos, sin], do_rotary=1, **fixed)
    # The first sequence has only four tokens of the past.
    last = np.array([4, 6], np.int32)
    cases.add("gqa_token_lengths", op, [*tensors(1), *past, last, total, cos, sin], do_rotary=1,
              unread=(1, 2), **fixed)


def rotary_embedding(cases: Cases) -> None:
    f, op = cases.floats, "RotaryEmbedding"
    cos, sin = f(16, 4), f(16, 4)
    flat, heads = f(BATCH, TOKENS, 24), f(BATCH, 3, TOKENS, 8)
    ids = np.array([[0, 2, 1, 7, 3], [4, 5, 6, 7, 8]], np.int64)
    start = np.array([3], np.int64)
    for name, x in (("flat", flat), ("heads", heads)):
        for interleaved in (0, 1):
            for at, positions in (("ids", ids), ("start", start)):
                cases.add(f"rotary_{name}_{at}_{interleaved}", op, [x, positions, cos, sin],
                          fixed=(2, 3), interleaved=interleaved)


def fused(cases: Cases) -> None:
    f = cases.floats
    x, w, b = f(1, 3, 6, 5), f(4, 3, 3, 3), f(4)
    conv = {"fixed": (1, 2), "kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    z = f(1, 4, 6, 5)
    cases.add("fused_conv_relu", "FusedConv", [x, w, b], activation="Relu", **conv)
    cases.add("fused_conv_sum", "FusedConv", [x, w, b, z], activation="Relu", **conv)
    for name, values in (("LeakyRelu", [0.2]), ("Clip", [-0.5, 1.5]), ("HardSigmoid", [0.3, 0.4])):
        cases.add(f"fused_conv_{name.lower()}", "FusedConv", [x, w, b], activation=name,
                  activation_params=values, **conv)
    a, c = f(5, 7), f(7, 6)
    cases.add("fused_gemm", "FusedGemm", [a, c, f(6)], activation="LeakyRelu", alpha=0.5,
              activation_alpha=0.1)
    inputs = [f(2, 7, 5), f(2, 6, 7)]
    cases.add("fused_matmul", "FusedMatMul", inputs, transA=1, transB=1, alpha=0.3)
    cases.add("bias_gelu", "BiasGelu", [f(3, 8), f(8)])
    cases.add("fast_gelu", "FastGelu", [f(3, 8), f(8)])
    cases.add("quick_gelu", "QuickGelu", [f(3, 8)], alpha=1.5)
    norm = [f(2, 5, 8), f(2, 5, 8), f(8)]
    cases.add("skip_norm", "SkipLayerNormalization", [*norm, f(8), f(8)], outputs=4, skip=(1, 2),
              epsilon=1e-5)
    cases.add("skip_simplified_norm", "SkipSimplifiedLayerNormalization", [*norm, f(8)], outputs=4,
              skip=(1, 2), epsilon=1e-5)
    cases.add("simplified_norm", "SimplifiedLayerNormalization", [norm[0], norm[2]], domain="",
              epsilon=1e-5)
    ids = cases.random.integers(0, 9, (BATCH, TOKENS)).astype(np.int32)
    segments = cases.random.integers(0, 2, (BATCH, TOKENS)).astype(np.int32)
    tables = [f(9, 8), f(TOKENS, 8), f(2, 8), f(8), f(8)]
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    embed = {"outputs": 2, "fixed": (2, 3, 4, 5, 6), "epsilon": 1e-5}
    cases.integers = ("y1",)
    cases.add("embed_norm", "EmbedLayerNormalization", [ids, segments, *tables, mask], **embed)
    cases.add("embed_norm_words", "EmbedLayerNormalization",
              [ids, None, *tables[:2], None, *tables[3:], mask], **embed)
    cases.integers = ()


def control(cases: Cases) -> None:
    f = cases.floats
    x = np.abs(f(2, 3))
    cases.text("if_data", """
main (float[2,3] x) => (float[2,3] y, float[2,3] z) {
  sum = ReduceSum <keepdims = 0> (x)
  zero = Constant <value = float {0}> ()
  positive = Greater (sum, zero)
  y, z = If (positive) <
    then_branch = on () => (float[2,3] a, float[2,3] b) { a = Add (x, x)  b = Relu (x) },
    else_branch = off () => (float[2,3] a, float[2,3] b) { t = Neg (x)  a = Exp (t)  b = Abs (t) }
  >
}""", [{"x": x}, {"x": -x}])
    cases.text("if_shape", """
main (float[2,1,3] x) => (float[2,3] y) {
  size = Shape <start = 1, end = 2> (x)
  one = Constant <value = int64[1] {1}> ()
  axis = Constant <value = int64[1] {1}> ()
  single = Equal (size, one)
  squeezed = If (single) <
    then_branch = on () => (float[2,3] a) { a = Squeeze (x, axis) },
    else_branch = off () => (float[2,1,3] a) { a = Identity (x) }
  >
  y = Tanh (squeezed)
}""", [{"x": f(2, 1, 3)}])
    body = """body (int64 i, bool c, float[3] s) => (bool d, float[3] t, float[3] row) {
      d = Identity (c)
      half = Constant <value = float {0.5}> ()
      n = Cast <to = 1> (i)
      scaled = Mul (s, half)
      sum = Add (scaled, x)
      t = Add (sum, n)
      row = Mul (t, x)
    }"""
    cases.text("loop", f"""
main (float[3] x) => (float[3] last, float[4,3] rows) {{
  count = Constant <value = int64 {{4}}> ()
  go = Constant <value = bool {{1}}> ()
  last, rows = Loop (count, go, x) <body = {body}>
}}""", [{"x": f(3)}])
    cases.text("loop_with_if", """
main (float[3] x) => (float[3] last) {
  count = Constant <value = int64 {3}> ()
  last = Loop (count, , x) <body = body (int64 i, bool c, float[3] s) => (bool d, float[3] t) {
      d = Identity (c)
      sum = ReduceSum <keepdims = 0> (s)
      one = Constant <value = float {1}> ()
      large = Greater (sum, one)
      two = Constant <value = int64 {2}> ()
      is_last = Equal (i, two)
      u = If (large) <
        then_branch = on () => (float[3] a) { a = Sub (s, one) },
        else_branch = off () => (float[3] a) { a = Add (s, x) }
      >
      t = If (is_last) <
        then_branch = fin () => (float[3] a) { a = Neg (u) },
        else_branch = mid () => (float[3] a) { a = Identity (u) }
      >
    }>
}""", [{"x": f(3)}, {"x": np.abs(f(3)) + 1}])
    scan = """body (float[2] s, float[2] e) => (float[2] t, float[2] row) {
      t = Add (s, e)
      row = Mul (t, k)
    }"""
    for direction in (0, 1):
        cases.text(f"scan_{direction}", f"""
main (float[2] s, float[4,2] xs, float[2] k) => (float[2] last, float[4,2] rows) {{
  last, rows = Scan <num_scan_inputs = 1, scan_input_directions = [{direction}], body = {scan}>
    (s, xs)
}}""", [{"s": f(2), "xs": f(4, 2), "k": f(2)}])


def quantized(cases: Cases) -> None:
    f = cases.floats
    cases.types = {"y0": TensorProto.UINT8}

    def bytes_of(*shape: int) -> np.ndarray:
        return cases.random.integers(0, 256, shape).astype(np.uint8)

    def scale(value: float) -> np.ndarray:
        return np.array(value, np.float32)

    def zero(value: int) -> np.ndarray:
        return np.array(value, np.uint8)

    x, y = bytes_of(2, 3, 8, 8), bytes_of(2, 3, 8, 8)
    # Without common factors, so that no result is half way between two bytes.
    a, b, c = ([scale(s), zero(z)] for s, z in ((0.01337, 120), (0.02113, 77), (0.03071, 101)))
    cases.add("qlinear_add", "QLinearAdd", [x, *a, y, *b, *c])
    cases.add("qlinear_mul", "QLinearMul", [x, *a, y, *b, *c])
    cases.add("qlinear_add_row", "QLinearAdd", [x, *a, y[0, 0, 0], *b, *c])
    cases.add("qlinear_sigmoid", "QLinearSigmoid", [x, *a, scale(1 / 256), zero(0)],
              fixed=(1, 2, 3, 4))
    cases.add("qlinear_leaky", "QLinearLeakyRelu", [x, *a, *c], fixed=(1, 2, 3, 4), alpha=0.2)
    cases.add("qlinear_concat", "QLinearConcat", [*c, x, *a, y, *b], axis=1,
              fixed=(0, 1, 3, 4, 6, 7))
    cases.add("qlinear_average_pool", "QLinearAveragePool", [x, *a, *b], kernel_shape=[3, 3],
              pads=[1, 1, 1, 1], strides=[2, 2], fixed=(1, 2, 3, 4))
    cases.add("qlinear_global_pool", "QLinearGlobalAveragePool", [x, *a, *b])
    m, w = bytes_of(4, 16), bytes_of(16, 5)
    bias = cases.random.integers(-900, 900, 5).astype(np.int32)
    cases.add("qgemm", "QGemm", [m, *a, w, *b, bias, scale(0.09), zero(128)],
              fixed=(1, 2, 3, 4, 5, 6, 7, 8))
    cases.types = {}
    cases.add("qgemm_numbers", "QGemm", [m, *a, w, *b, bias], fixed=(1, 2, 3, 4, 5, 6))
    left, b_scale = f(4, 16), np.abs(f(5)) + 0.01
    cases.add("dynamic_matmul", "DynamicQuantizeMatMul", [left, w, scale(0.02), zero(90), f(5)],
              fixed=(1, 2, 3, 4))
    cases.add("integer_to_float", "MatMulIntegerToFloat",
              [m, w, scale(0.01), b_scale, zero(3), bytes_of(5), f(5)], fixed=(1, 3, 5, 6))
    for size, inner in ((16, 32), (32, 48)):
        blocks = -(-inner // size)
        packed, scales = bytes_of(5, blocks, size // 2), np.abs(f(5 * blocks)) + 0.01
        points = bytes_of(5 * -(-blocks // 2))
        shape = {"K": inner, "N": 5, "bits": 4, "block_size": size}
        cases.add(f"matmul_bits_{size}", "MatMulNBits", [f(3, inner), packed, scales],
                  fixed=(1, 2), **shape)
        cases.add(f"matmul_bits_{size}_zero", "MatMulNBits", [f(3, inner), packed, scales, points],
                  fixed=(1, 2, 3), **shape)


def forest(cases: Cases, trees: int, depth: int, targets: int) -> dict[str, list]:
    """The nodes of random trees, and what their leaves add."""
    lists: dict[str, list] = {name: [] for name in (
        "treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids",
        "missing_value_tracks_true")}
    leaves: list[tuple[int, int, int, float]] = []
    for tree in range(trees):
        count = 2 ** (depth + 1) - 1
        for node in range(count):
            leaf = node >= count // 2
            lists["treeids"].append(tree)
            lists["nodeids"].append(node)
            lists["featureids"].append(int(cases.random.integers(0, 4)))
            lists["values"].append(float(np.float32(cases.random.uniform(-1, 1))))
            kinds = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT")
            lists["modes"].append("LEAF" if leaf else kinds[tree % len(kinds)])
            lists["truenodeids"].append(0 if leaf else 2 * node + 1)
            lists["falsenodeids"].append(0 if leaf else 2 * node + 2)
            lists["missing_value_tracks_true"].append(int(cases.random.integers(0, 2)))
            if leaf:
                target = int(cases.random.integers(0, targets))
                leaves.append((tree, node, target, float(np.float32(cases.floats(1)[0]))))
    return {"nodes": lists, "leaves": leaves}


def classical(cases: Cases) -> None:
    f = cases.floats
    ml = {"domain": "ai.onnx.ml"}
    rows = f(11, 4)
    rows[3, 1] = np.nan
    for targets, what in ((1, "target"), (3, "target"), (2, "class"), (3, "class")):
        made = forest(cases, 8, 3, targets if what == "target" else max(targets - 1, 1))
        if what == "class" and targets == 3:
            made["leaves"] = [(t, n, int(i % 3), w) for i, (t, n, _, w)
                              in enumerate(made["leaves"])]
        attributes: dict[str, object] = {f"nodes_{k}": v for k, v in made["nodes"].items()}
        columns = list(zip(*made["leaves"], strict=True))
        for name, column in zip(("treeids", "nodeids", "ids", "weights"), columns, strict=True):
            attributes[f"{what}_{name}"] = list(column)
        if what == "target":
            for function in ("SUM", "AVERAGE", "MIN", "MAX")[: 4 if targets == 1 else 1]:
                cases.add(f"trees_{targets}_{function.lower()}", "TreeEnsembleRegressor", [rows],
                          n_targets=targets, aggregate_function=function, **attributes, **ml)
        else:
            cases.types = {"y0": TensorProto.INT64}
            for post in ("NONE", "LOGISTIC", "SOFTMAX"):
                cases.add(f"tree_classes_{targets}_{post.lower()}", "TreeEnsembleClassifier",
                          [rows], outputs=2, classlabels_int64s=[7, 9, 11][:targets],
                          post_transform=post, **attributes, **ml)
            cases.types = {}
    clean = np.nan_to_num(rows)
    cases.add("linear_regressor", "LinearRegressor", [clean], targets=2,
              coefficients=f(8).tolist(), intercepts=f(2).tolist(), **ml)
    cases.types = {"y0": TensorProto.INT64}
    for count, post in ((1, "LOGISTIC"), (1, "NONE"), (2, "LOGISTIC"), (3, "SOFTMAX")):
        cases.add(f"linear_classes_{count}_{post.lower()}", "LinearClassifier", [clean], outputs=2,
                  coefficients=f(4 * count).tolist(), intercepts=f(count).tolist(),
                  classlabels_ints=[3, 5, 8][: max(count, 2)], post_transform=post, **ml)
    support = {"support_vectors": f(6 * 4).tolist(), "kernel_params": [0.4, 0.3, 2.0]}
    for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        for classes in (2, 3):
            pairs = classes * (classes - 1) // 2
            cases.add(f"svm_classes_{classes}_{kernel.lower()}", "SVMClassifier", [clean],
                      outputs=2, coefficients=f(6 * (classes - 1)).tolist(), kernel_type=kernel,
                      vectors_per_class=[6 // classes] * classes, rho=f(pairs).tolist(),
                      prob_a=(-np.abs(f(pairs)) - 0.5).tolist(), prob_b=f(pairs).tolist(),
                      classlabels_ints=[3, 5, 8][:classes], **support, **ml)
        cases.types = {}
        cases.add(f"svm_{kernel.lower()}", "SVMRegressor", [clean], n_supports=6,
                  coefficients=f(6).tolist(), rho=f(1).tolist(), kernel_type=kernel, **support,
                  **ml)
        cases.types = {"y0": TensorProto.INT64}
    cases.types = {}
    cases.add("scaler", "Scaler", [clean], offset=f(4).tolist(), scale=f(4).tolist(), **ml)
    cases.add("imputer", "Imputer", [rows], imputed_value_floats=f(4).tolist(),
              replaced_value_float=float("nan"), **ml)
    for norm in ("MAX", "L1", "L2"):
        cases.add(f"normalizer_{norm.lower()}", "Normalizer", [np.abs(clean)], norm=norm, **ml)
    cases.add("one_hot_labels", "OneHotEncoder", [np.array([[2, 7], [4, 2]], np.int64)],
              cats_int64s=[2, 4, 9], zeros=1, **ml)
    cases.add("features", "FeatureVectorizer", [clean, f(11, 2)], inputdimensions=[4, 2], **ml)
    cases.types = {"y0": TensorProto.STRING}
    words = np.array([["a b;c", ""], ["héllo wörld", "x;;y"]], dtype=object)
    cases.add("tokens", "Tokenizer", [words], mark=1, pad_value="#", separators=[" ", ";"],
              mincharnum=1)
    cases.add("characters", "Tokenizer", [words], mark=0, pad_value="#", separators=[""],
              mincharnum=1)
    cases.types = {}


def zip_map(cases: Cases) -> None:
    """A sequence of maps: the case has its values and its keys."""
    labels, domain = ["a", "b"], "ai.onnx.ml"
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["l", "p"], domain=domain,
                         coefficients=[1.0, -1.0], intercepts=[0.1, 0.0],
                         classlabels_strings=labels, post_transform="LOGISTIC"),
        helper.make_node("ZipMap", ["p"], ["z"], domain=domain, classlabels_strings=labels),
    ]
    row = helper.make_map_type_proto(
        TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
    outputs = [
        helper.make_tensor_value_info("l", TensorProto.STRING, ["N"]),
        helper.make_value_info("z", helper.make_sequence_type_proto(row)),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1])]
    graph = helper.make_graph(nodes, "zip_map", inputs, outputs)
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    given = {"x": np.array([[-1.0], [0.4], [2.0]], np.float32)}
    label, maps = results(model, given)
    values = np.array([list(one.values()) for one in maps], np.float32)
    keys = np.array([list(one.keys()) for one in maps], dtype=object)
    cases.save("zip_map", model, [(given, [np.array(label, dtype=object), values, keys])])


ML = "ai.onnx.ml"


def map_type(key: int, value: int) -> onnx.TypeProto:
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, []))


def maps(cases: Cases) -> None:
    """Inputs that are maps: the case has values and keys."""
    words = np.array(["one", "two", "three", "four", "five"], dtype=object)
    numbers = np.array([3, 0, 7, 4, 2], np.int64)
    floats, texts = cases.floats(5), np.array(["a", "bc", "", "d", "7"], dtype=object)
    spoken = {"string_vocabulary": ["three", "none", "one", "five"]}
    counted = {"int64_vocabulary": [4, 9, 0, 3]}
    digits = np.array(["1.5", "-2", "3e2", "4", "0"], dtype=object)
    table = [
        ("dict_words", "DictVectorizer", words, floats, spoken),
        ("dict_words_integers", "DictVectorizer", words, numbers, spoken),
        ("dict_numbers", "DictVectorizer", numbers, floats, counted),
        ("dict_texts", "DictVectorizer", numbers, texts, counted),
        ("cast_map", "CastMap", numbers, floats, {"cast_to": "TO_FLOAT"}),
        ("cast_map_sparse", "CastMap", numbers, floats, {"map_form": "SPARSE", "max_map": 9}),
        ("cast_map_texts", "CastMap", numbers, digits, {"cast_to": "TO_FLOAT"}),
    ]
    for name, op, keys, values, attributes in table:
        kinds = [TensorProto.STRING if x.dtype == object else
                 helper.np_dtype_to_tensor_dtype(x.dtype) for x in (keys, values)]
        out = TensorProto.FLOAT if op == "CastMap" else kinds[1]
        node = helper.make_node(op, ["m"], ["y"], domain=ML, **attributes)
        graph = helper.make_graph(
            [node], name, [helper.make_value_info("m", map_type(*kinds))],
            [helper.make_tensor_value_info("y", out, None)],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        entries = dict(zip(keys.tolist(), values.tolist(), strict=True))
        wanted = attributes.get("string_vocabulary", attributes.get("int64_vocabulary"))
        if op == "DictVectorizer" and values.dtype != np.float32:
            # ONNX Runtime's Python takes no such maps.
            row = [entries.get(key, "" if values.dtype == object else 0) for key in wanted]
            expected = [np.array([row], values.dtype)]
        elif values.dtype == object:
            expected = [np.array([[float(entries[key]) for key in sorted(entries)]], np.float32)]
        else:
            expected = results(model, {"m": entries})
        cases.save(name, model, [({"values": values, "keys": keys}, expected)])


SEQUENCE_BODY = """
    shifted = SequenceMap <body = each (float[2, k] one, float[k] two) => (float[2, k] sum) {
        sum = Add (one, two)
    }> (s, b)
"""


def sequences(cases: Cases) -> None:
    """Sequences and optionals as inputs and outputs, members of one shape."""
    f = cases.floats
    header = '<ir_version: 9, opset_import: ["" : 17]>\n'

    def stacked(name: str, text: str, sets: list[dict[str, np.ndarray]]) -> None:
        """Input `s` and output `z` are sequences for ONNX Runtime and stacks in the case."""
        model = onnx.parser.parse_model(header + text)
        rows = []
        for given in sets:
            fed = given | {"s": list(given["s"])} if "s" in given else given
            out = [np.stack(x) if isinstance(x, list) else x for x in results(model, fed)]
            rows.append((given, out))
        cases.save(name, model, rows)

    def long(*values: int) -> np.ndarray:
        return np.array(values[0] if len(values) == 1 else values, np.int64)

    stacked(
        "sequence_input",
        """g (seq(float[2, k]) s, int64 i) => (float[2, k] y, int64 n, float[a, k] r, float[2, c] w,
                                             float[2, m, k] v) {
            y = SequenceAt (s, i)
            n = SequenceLength (s)
            r = ConcatFromSequence <axis = 0> (s)
            w = ConcatFromSequence <axis = -1> (s)
            v = ConcatFromSequence <axis = 1, new_axis = 1> (s)
        }""",
        [{"s": f(n, 2, 3), "i": long(i)} for n, i in ((4, 2), (1, 0), (3, -1))],
    )
    stacked(
        "sequence_changed",
        """g (seq(float[2, k]) s, float[2, k] x, int64 i) => (seq(float[2, k]) z) {
            zero = Constant <value_int = 0> ()
            a = SequenceErase (s, i)
            b = SequenceInsert (a, x)
            c = SequenceInsert (b, x, zero)
            z = SequenceErase (c)
        }""",
        [{"s": f(n, 2, 3), "x": f(2, 3), "i": long(i)} for n, i in ((4, 1), (1, 0), (3, -3))],
    )
    stacked(
        "sequence_map",
        f"g (seq(float[2, k]) s, float[k] b) => (seq(float[2, k]) z) {{{SEQUENCE_BODY}"
        "z = Identity (shifted) }",
        [{"s": f(n, 2, 3), "b": f(3)} for n in (4, 1)],
    )
    stacked(
        "sequence_of_rows",
        """g (float[n, k] x) => (float[k, n] y) {
            s = SplitToSequence <axis = 0, keepdims = 0> (x)
            y = ConcatFromSequence <axis = 1, new_axis = 1> (s)
        }""",
        [{"x": f(n, 3)} for n in (5, 1)],
    )
    stacked(
        "sequence_map_written",
        """g (float[6, k] x, float[k] b) => (float[6, k] y) {
            two = Constant <value_int = 2> ()
            s = SplitToSequence <axis = 0> (x, two)
        """ + SEQUENCE_BODY + "y = ConcatFromSequence <axis = 0> (shifted) }",
        [{"x": f(6, 3), "b": f(3)}],
    )
    model = onnx.parser.parse_model(
        header + """g (float[n] x, int64[3] l) => (seq(float[p]) z, int64 n) {
            z = SplitToSequence <axis = 0> (x, l)
            n = SequenceLength (z)
        }"""
    )
    given = {"x": f(9), "l": long(2, 3, 4)}
    parts, length = results(model, given)
    cases.save("sequence_output", model, [(given, [*parts, length])])
    model = onnx.parser.parse_model(
        header + """g (optional(float[n]) o) => (bool h, float[n] y) {
            h = OptionalHasElement (o)
            e = OptionalGetElement (o)
            y = Neg (e)
        }"""
    )
    given = {"o": f(4)}
    cases.save("optional_input", model, [(given, [np.array(True), -given["o"]])])


def functions(cases: Cases) -> None:
    """Control flow in functions of the model, and functions called by control flow."""
    header = '<ir_version: 9, opset_import: ["" : 17, "own" : 1]>\n'
    local = '<domain: "own", opset_import: ["" : 17, "own" : 1]>\n'
    branch = local + """
    choose <factor> (x, flag) => (y) {
        scaled = Constant <value_float : float = @factor> ()
        y = If (flag) <
            then_branch = t () => (float[n] a) {
                k = Constant <value_float : float = @factor> ()
                b = Mul (x, k)
                a = own.twice (b)
            },
            else_branch = e () => (float[n] a) { c = Abs (x)  a = Sub (c, scaled) }
        >
    }
    """ + local + "twice (x) => (y) { y = Add (x, x) }\n"
    loop = local + """
    accumulate (x, rounds) => (y, all) {
        yes = Constant <value = bool {1}> ()
        two = Constant <value_float = 2.0> ()
        start = Mul (x, two)
        y, all = Loop (rounds, yes, start) <
            body = b (int64 i, bool c, float[n] s) => (bool go, float[n] t, float[n] u) {
                go = Identity (c)
                k = CastLike (i, x)
                p = Mul (x, k)
                q = Greater (p, s)
                r = ReduceMax <keepdims = 0> (x)
                big = Greater (r, k)
                w = If (big) <
                    then_branch = t () => (float[n] v) { v = own.twice (p) },
                    else_branch = e () => (float[n] v) { v = Where (q, p, x) }
                >
                t = Add (s, w)
                u = Neg (t)
            }
        >
    }
    """ + local + "twice (x) => (y) { y = Add (x, x) }\n"
    f = cases.floats

    def add(name: str, text: str, sets: list[dict[str, np.ndarray]]) -> None:
        model = onnx.parser.parse_model(header + text)
        cases.save(name, model, [(given, results(model, given)) for given in sets])

    flags = [{"x": f(5), "flag": np.array(flag)} for flag in (True, False)]
    add(
        "function_if",
        """g (float[n] x, bool flag) => (float[n] y) {
            a = own.choose <factor = 3.0> (x, flag)
            y = own.choose <factor = -0.5> (a, flag)
        }
        """ + branch,
        flags,
    )
    rounds = [{"x": 5 * f(4), "rounds": np.array(n, np.int64)} for n in (0, 1, 6)]
    add(
        "function_loop",
        """g (float[n] x, int64 rounds) => (float[n] y, float[m, n] z) {
            y, z = own.accumulate (x, rounds)
        }
        """ + loop,
        rounds[1:],
    )
    add(
        "function_loop_written",
        """g (float[n] x) => (float[n] y, float[m, n] z) {
            rounds = Constant <value = int64 {3}> ()
            y, z = own.accumulate (x, rounds)
        }
        """ + loop,
        [{"x": 5 * f(4)}],
    )


def halves(cases: Cases) -> None:
    """Sums that all lie a hair's breadth from the middle of two steps: the end of a Gelu."""
    cases.types = {"y0": TensorProto.INT8}
    x = cases.random.integers(-128, 128, (2, 3, 8, 8)).astype(np.int8)
    step, one = np.array(2 / 255, np.float32), np.array(1 / 127, np.float32)
    zero, low = np.array(0, np.int8), np.array(-128, np.int8)
    inputs = [x, step, zero, np.array(127, np.int8), one, zero, step, low]
    cases.add("qlinear_add_halves", "QLinearAdd", inputs, fixed=(1, 2, 3, 4, 5, 6, 7))
    cases.types = {}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    cases = Cases(folder)
    attentions = (attention, multi_head_attention, group_query_attention)
    for add in (*attentions, rotary_embedding, fused, control, quantized, classical, zip_map,
                maps, sequences, functions, halves):
        add(cases)
    print(f"{len(list(folder.iterdir()))} cases in {folder}")


if __name__ == "__main__":
    main()
