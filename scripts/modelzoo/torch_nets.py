"""Well-known networks with random weights, exported by torch.

Weights that come straight from an initializer let activations grow layer by layer (a random
ResNet-152 reaches logits of 1e8), which does not test fp16 kernels. So every network is
calibrated: batch norms get the statistics of random images, layers without a norm are scaled to
unit output, and the last layer to logits of a few units.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import torch
from torch import nn

from modelzoo.target import OPSET, Built

SEED = 11
LOGIT_STD = 2.0
TOKENS = 128


def _pictures(batch: int, side: int) -> torch.Tensor:
    """Noise with large-scale structure: white noise averages out before the deep layers see it."""
    coarse = torch.randn(batch, 3, 8, 8)
    smooth = nn.functional.interpolate(
        coarse, size=(side, side), mode="bilinear", align_corners=False
    )
    return smooth + 0.3 * torch.randn(batch, 3, side, side)


def calibrate_norms(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Sets every batch norm's running statistics to what it sees on `batches`."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    model.eval()  # dropout stays off: only the norms learn
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over the batches
        norm.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    model.eval()


def calibrate_layers(model: nn.Module, batch: torch.Tensor) -> None:
    """Scales each convolution and linear layer, first to last, to an output deviation of one."""

    def rescale(layer: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        scale = 1.0 / output.std().clamp_min(1e-6)
        layer.weight.mul_(scale)
        if layer.bias is not None:
            layer.bias.mul_(scale)
        return output * scale

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(rescale) for layer in layers]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()


def calibrate_head(model: nn.Module, batch: torch.Tensor) -> None:
    """Scales the last linear layer so that logits are a few units."""
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        scale = LOGIT_STD / model(batch).std()
        head.weight.mul_(scale)
        head.bias.mul_(scale)


def _export(
    model: nn.Module,
    args: tuple[torch.Tensor, ...],
    inputs: list[str],
    output: str,
    axes: dict[int, str],
) -> onnx.ModelProto:
    """Exports through TorchScript, like most published ONNX files."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            args,
            buffer,
            input_names=inputs,
            output_names=[output],
            dynamic_axes={name: axes for name in [*inputs, output]},
            opset_version=OPSET,
            dynamo=False,
        )
    return onnx.load_from_string(buffer.getvalue())


def _vision(make: Callable[..., nn.Module], side: int = 224, **options: object) -> Built:
    torch.manual_seed(SEED)
    model = make(weights=None, **options)
    batches = [_pictures(8, side) for _ in range(2)]
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        calibrate_norms(model, batches)
    else:
        model.eval()
        calibrate_layers(model, batches[0])
    calibrate_head(model, batches[0])
    sample = _pictures(1, side)
    exported = _export(model, (sample,), ["image"], "logits", {0: "batch"})
    return Built(exported, {"image": sample.numpy()}, module=model)


def resnet50() -> Built:
    from torchvision import models

    return _vision(models.resnet50)


def resnet101() -> Built:
    from torchvision import models

    return _vision(models.resnet101)


def resnet152() -> Built:
    from torchvision import models

    return _vision(models.resnet152)


def densenet201() -> Built:
    from torchvision import models

    return _vision(models.densenet201)


def vgg16() -> Built:
    from torchvision import models

    return _vision(models.vgg16)


def vgg19() -> Built:
    from torchvision import models

    return _vision(models.vgg19)


def inception_v3() -> Built:
    from torchvision import models

    # The auxiliary head is for training only, and the default initializer takes minutes.
    return _vision(models.inception_v3, side=299, aux_logits=False, init_weights=False)


def mobilenet_v2() -> Built:
    from torchvision import models

    return _vision(models.mobilenet_v2)


class _LastHidden(nn.Module):
    """Token ids and a 0/1 mask in, the last hidden state out."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.eval()
        self.additive = takes_additive_mask(encoder)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask
        if self.additive:
            mask = additive_mask(attention_mask).to(self.encoder.dtype)
        return self.encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state


def additive_mask(mask: torch.Tensor) -> torch.Tensor:
    """0 where a token counts, -10000 where not: large enough, and it fits fp16."""
    return (1.0 - mask[:, None, None, :].to(torch.float32)) * -10000.0


def takes_additive_mask(encoder: nn.Module) -> bool:
    """Whether this release of transformers takes a 4-D additive mask as it is.

    If it does, the graph has no nodes that build masks. Some releases silently read such a mask as
    0/1 and give wrong values, so both forms are compared.
    """
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        wanted = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        try:
            got = encoder(input_ids=ids, attention_mask=additive_mask(mask)).last_hidden_state
        except (ValueError, RuntimeError, TypeError):
            return False
    return torch.allclose(got, wanted, atol=1e-4)


def _text(encoder: nn.Module, vocabulary: int) -> Built:
    ids = torch.randint(1000, vocabulary, (2, TOKENS))
    mask = torch.ones_like(ids)
    module = _LastHidden(encoder).eval()
    exported = _export(
        module,
        (ids, mask),
        ["input_ids", "attention_mask"],
        "last_hidden_state",
        {0: "batch", 1: "sequence"},
    )
    samples = {"input_ids": ids[:1].numpy(), "attention_mask": np.ones((1, TOKENS), np.int64)}
    return Built(exported, samples, module=module)


def distilbert() -> Built:
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(SEED)
    config = DistilBertConfig(attn_implementation="eager")
    return _text(DistilBertModel(config), config.vocab_size)


def bert_large() -> Built:
    from transformers import BertConfig, BertModel

    torch.manual_seed(SEED)
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    return _text(BertModel(config, add_pooling_layer=False), config.vocab_size)
