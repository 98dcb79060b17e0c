"""Networks of many domains with random weights, for comparisons with PyTorch.

Every builder returns a module and a batch of two sample inputs; the first dimension of every input
is the batch. Modules come from torchvision and transformers, or are written here in the way their
papers describe. Batch norms are calibrated on the samples, so that activations stay in the range
of half precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

SEED = 23


@dataclass
class Net:
    """A module and samples of its inputs, in the order of its arguments."""

    module: nn.Module
    samples: dict[str, Tensor]


BUILDERS: dict[str, tuple[str, Callable[[], Net]]] = {}


def net(domain: str) -> Callable:
    """Registers a builder under its own name."""

    def register(builder: Callable[[], Net]) -> Callable[[], Net]:
        BUILDERS[builder.__name__] = (domain, builder)
        return builder

    return register


def build(name: str) -> Net:
    """The network `name`, always with the same weights."""
    torch.manual_seed(SEED)
    made = BUILDERS[name][1]()
    made.module.eval()
    for layer in made.module.modules():
        # A head that starts at zero would hide every error before it.
        if isinstance(layer, nn.Linear) and not layer.weight.any():
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    calibrate(made)
    return made


def calibrate(made: Net) -> None:
    """Sets the statistics of every batch norm to what it sees on the samples."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [m for m in made.module.modules() if isinstance(m, kinds)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        with torch.no_grad():
            made.module(*made.samples.values())
    made.module.eval()


def pictures(side: int, channels: int = 3, width: int | None = None) -> dict[str, Tensor]:
    """Two images with large-scale structure; white noise averages out in deep networks."""
    size = (side, width or side)
    coarse = torch.randn(2, channels, 8, 8)
    smooth = fn.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
    return {"image": smooth + 0.3 * torch.randn(2, channels, *size)}


def tokens(length: int, vocabulary: int, mask: bool = True) -> dict[str, Tensor]:
    samples = {"input_ids": torch.randint(5, vocabulary, (2, length))}
    if mask:
        samples["attention_mask"] = torch.ones(2, length, dtype=torch.int64)
    return samples


class Pick(nn.Module):
    """One tensor out of a module's dictionary or data class of outputs."""

    def __init__(self, inner: nn.Module, key: str, names: list[str]) -> None:
        super().__init__()
        self.inner, self.key, self.names = inner, key, names

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(**dict(zip(self.names, args, strict=True)))[self.key]


def vision(name: str, side: int = 224, **options: object) -> Net:
    from torchvision import models

    return Net(getattr(models, name)(weights=None, **options), pictures(side))


def add_torchvision() -> None:
    """Classifiers of torchvision, which need no code of their own."""
    names = {
        "alexnet": 224,
        "squeezenet1_1": 224,
        "resnet18": 224,
        "mobilenet_v3_large": 224,
        "mnasnet1_0": 224,
        "shufflenet_v2_x1_0": 224,
        "efficientnet_b0": 224,
        "efficientnet_v2_s": 384,
        "regnet_y_1_6gf": 224,
        "resnext50_32x4d": 224,
        "wide_resnet50_2": 224,
        "convnext_tiny": 224,
        "vit_b_16": 224,
        "swin_t": 224,
        "swin_v2_t": 256,
        "maxvit_t": 224,
    }
    for name, side in names.items():
        BUILDERS[name] = ("vision", lambda name=name, side=side: vision(name, side))


add_torchvision()


@net("vision")
def googlenet() -> Net:
    return vision("googlenet", aux_logits=False, init_weights=False)


@net("vision")
def mlp_mixer() -> Net:
    class Mixer(nn.Module):
        def __init__(self, count: int, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.token = nn.Sequential(nn.Linear(count, 256), nn.GELU(), nn.Linear(256, count))
            self.channel = nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.token(self.first(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channel(self.second(x))

    class MlpMixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 512, 16, 16)
            self.blocks = nn.Sequential(*[Mixer(196, 512) for _ in range(8)])
            self.head = nn.Linear(512, 1000)

        def forward(self, image: Tensor) -> Tensor:
            return self.head(self.blocks(self.stem(image).flatten(2).transpose(1, 2)).mean(1))

    return Net(MlpMixer(), pictures(224))


@net("vision")
def clip_vision() -> Net:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig())
    return Net(Pick(model, "pooler_output", ["pixel_values"]), pictures(224))


# Detection -------------------------------------------------------------------------------------


class ConvAct(nn.Sequential):
    """Convolution, batch norm, SiLU."""

    def __init__(self, inner: int, outer: int, size: int = 3, stride: int = 1) -> None:
        conv = nn.Conv2d(inner, outer, size, stride, (size - 1) // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outer), nn.SiLU())


class CrossStage(nn.Module):
    """YOLO's cross-stage block: two branches, one of them with residual bottlenecks."""

    def __init__(self, inner: int, outer: int, count: int) -> None:
        super().__init__()
        half = outer // 2
        self.left, self.right = ConvAct(inner, half, 1), ConvAct(inner, half, 1)
        steps = [nn.Sequential(ConvAct(half, half, 1), ConvAct(half, half)) for _ in range(count)]
        self.steps, self.join = nn.ModuleList(steps), ConvAct(outer, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        for step in self.steps:
            left = left + step(left)
        return self.join(torch.cat([left, self.right(x)], 1))


@net("detection")
def yolo_s() -> Net:
    class Yolo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [32, 64, 128, 256, 512]
            self.stem = ConvAct(3, 32, 6, 2)
            down = [ConvAct(a, b, 3, 2) for a, b in zip(widths, widths[1:], strict=False)]
            self.down = nn.ModuleList(down)
            counts = [1, 2, 3, 1]
            blocks = [CrossStage(b, b, n) for b, n in zip(widths[1:], counts, strict=True)]
            self.blocks = nn.ModuleList(blocks)
            self.lateral = nn.ModuleList([CrossStage(768, 256, 1), CrossStage(384, 128, 1)])
            self.heads = nn.ModuleList([nn.Conv2d(c, 255, 1) for c in (128, 256, 512)])
            self.grow = nn.Upsample(scale_factor=2)

        def forward(self, image: Tensor) -> Tensor:
            x, levels = self.stem(image), []
            for down, block in zip(self.down, self.blocks, strict=True):
                x = block(down(x))
                levels.append(x)
            deep = levels[3]
            middle = self.lateral[0](torch.cat([self.grow(deep), levels[2]], 1))
            fine = self.lateral[1](torch.cat([self.grow(middle), levels[1]], 1))
            found = []
            for head, level in zip(self.heads, (fine, middle, deep), strict=True):
                y = head(level)
                y = y.view(y.shape[0], 3, 85, -1).permute(0, 1, 3, 2).sigmoid()
                found.append(y.reshape(y.shape[0], -1, 85))
            return torch.cat(found, 1)

    return Net(Yolo(), pictures(640))


@net("detection")
def retinanet_head() -> Net:
    from torchvision import models

    class Retina(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None)
            self.backbone, self.head = made.backbone, made.head

        def forward(self, image: Tensor) -> Tensor:
            found = self.head(list(self.backbone(image).values()))
            return torch.cat([found["cls_logits"], found["bbox_regression"]], 2)

    return Net(Retina(), pictures(512))


@net("detection")
def ssd_lite() -> Net:
    from torchvision import models

    class Ssd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = models.detection.ssdlite320_mobilenet_v3_large(
                weights=None, weights_backbone=None
            )
            self.backbone, self.head = made.backbone, made.head

        def forward(self, image: Tensor) -> Tensor:
            found = self.head(list(self.backbone(image).values()))
            return torch.cat([found["cls_logits"], found["bbox_regression"]], 2)

    return Net(Ssd(), pictures(320))


@net("detection")
def detr_like() -> Net:
    from torchvision import models

    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features = models.resnet18(weights=None)
            self.features = nn.Sequential(*list(features.children())[:-2])
            self.project = nn.Conv2d(512, 256, 1)
            self.transformer = nn.Transformer(256, 8, 3, 3, 1024, batch_first=True)
            self.query = nn.Parameter(torch.randn(100, 256))
            self.position = nn.Parameter(torch.randn(144, 256) * 0.1)
            self.head = nn.Linear(256, 96)

        def forward(self, image: Tensor) -> Tensor:
            memory = self.project(self.features(image)).flatten(2).transpose(1, 2) + self.position
            query = self.query.unsqueeze(0).expand(image.shape[0], -1, -1)
            return self.head(self.transformer(memory, query))

    return Net(Detr(), pictures(384))


# Segmentation and super resolution ----------------------------------------------------------------


@net("segmentation")
def deeplabv3() -> Net:
    from torchvision import models

    made = models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)
    return Net(Pick(made, "out", ["x"]), pictures(256))


@net("segmentation")
def lraspp() -> Net:
    from torchvision import models

    made = models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    return Net(Pick(made, "out", ["input"]), pictures(320))


@net("segmentation")
def segformer() -> Net:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=20))
    return Net(Pick(model, "logits", ["pixel_values"]), pictures(256))


class DoubleConv(nn.Sequential):
    def __init__(self, inner: int, outer: int, dims: int = 2) -> None:
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        norm = nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d
        first = [conv(inner, outer, 3, padding=1), norm(outer), nn.ReLU()]
        super().__init__(*first, conv(outer, outer, 3, padding=1), norm(outer), nn.ReLU())


class UNet(nn.Module):
    """The U-Net of 2015 with transposed convolutions, in two or three dimensions."""

    def __init__(self, inner: int, widths: list[int], dims: int) -> None:
        super().__init__()
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        pool = nn.MaxPool2d if dims == 2 else nn.MaxPool3d
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        pairs = list(zip(widths, widths[1:], strict=False))
        self.first, self.pool = DoubleConv(inner, widths[0], dims), pool(2)
        self.down = nn.ModuleList([DoubleConv(a, b, dims) for a, b in pairs])
        self.up = nn.ModuleList([up(b, a, 2, 2) for a, b in reversed(pairs)])
        self.merge = nn.ModuleList([DoubleConv(2 * a, a, dims) for a, b in reversed(pairs)])
        self.head = conv(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(self.pool(levels[-1])))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([levels.pop(), up(x)], 1))
        return self.head(x)


@net("segmentation")
def unet() -> Net:
    return Net(UNet(3, [32, 64, 128, 256, 512], 2), pictures(256))


@net("3-D")
def unet_3d() -> Net:
    return Net(UNet(1, [16, 32, 64, 128], 3), {"volume": torch.randn(2, 1, 32, 64, 64)})


@net("3-D")
def r3d_18() -> Net:
    from torchvision import models

    return Net(models.video.r3d_18(weights=None), {"clip": torch.randn(2, 3, 8, 112, 112)})


@net("3-D")
def pointnet() -> Net:
    class PointNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [3, 64, 64, 128, 1024]
            layers: list[nn.Module] = []
            for a, b in zip(widths, widths[1:], strict=False):
                layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
            self.points = nn.Sequential(*layers)
            self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 40))

        def forward(self, points: Tensor) -> Tensor:
            return self.head(self.points(points.transpose(1, 2)).amax(2))

    return Net(PointNet(), {"points": torch.randn(2, 2048, 3)})


@net("super resolution")
def espcn() -> Net:
    layers = [nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()]
    return Net(
        nn.Sequential(*layers, nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3)),
        pictures(240, 1, 320),
    )


@net("super resolution")
def edsr() -> Net:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * self.second(self.first(x).relu())

    class Edsr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 64, 3, padding=1)
            self.body = nn.Sequential(*[Block() for _ in range(8)])
            up = [nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2)]
            self.up = nn.Sequential(*up, nn.Conv2d(64, 3, 3, padding=1))

        def forward(self, image: Tensor) -> Tensor:
            x = self.stem(image)
            return self.up(x + self.body(x))

    return Net(Edsr(), pictures(180))


# Generation ------------------------------------------------------------------------------------


@net("generation")
def dcgan() -> Net:
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False)]
    for inner, outer in ((512, 256), (256, 128), (128, 64)):
        layers += [nn.BatchNorm2d(inner), nn.ReLU()]
        layers.append(nn.ConvTranspose2d(inner, outer, 4, 2, 1, bias=False))
    layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()]
    return Net(nn.Sequential(*layers), {"noise": torch.randn(2, 100, 1, 1)})


class Residual(nn.Module):
    """A diffusion U-Net's residual block: GroupNorm, SiLU, convolution, time embedding."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(32, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(512, outer)
        self.last, self.out = nn.GroupNorm(32, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv(fn.silu(self.norm(x))) + self.time(fn.silu(time))[:, :, None, None]
        return self.skip(x) + self.out(fn.silu(self.last(y)))


class CrossBlock(nn.Module):
    """A diffusion U-Net's transformer block: self and cross attention, gated feed-forward."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.q = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
        self.kv = nn.ModuleList([nn.Linear(w, 2 * width, bias=False) for w in (width, context)])
        self.o = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.gate, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor, context: Tensor, number: int) -> Tensor:
        b, n, c = x.shape
        q = self.q[number](x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = self.kv[number](context).chunk(2, -1)
        k = k.view(b, -1, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, -1, self.heads, c // self.heads).transpose(1, 2)
        y = fn.scaled_dot_product_attention(q, k, v)
        return self.o[number](y.transpose(1, 2).reshape(b, n, c))

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        b, c, h, w = image.shape
        x = self.norm(image).flatten(2).transpose(1, 2)
        y = self.norms[0](x)
        x = x + self.attend(y, y, 0)
        x = x + self.attend(self.norms[1](x), context, 1)
        value, gate = self.gate(self.norms[2](x)).chunk(2, -1)
        x = x + self.down(value * fn.gelu(gate))
        return image + x.transpose(1, 2).reshape(b, c, h, w)


@net("generation")
def diffusion_unet() -> Net:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(4, 320, 3, padding=1)
            self.first, self.attend = Residual(320, 320), CrossBlock(320, 768, 8)
            self.down = nn.Conv2d(320, 320, 3, 2, 1)
            self.second, self.deep = Residual(320, 640), CrossBlock(640, 768, 8)
            self.up = nn.Conv2d(640, 320, 3, padding=1)
            self.third, self.norm = Residual(640, 320), nn.GroupNorm(32, 320)
            self.last = nn.Conv2d(320, 4, 3, padding=1)

        def forward(self, latent: Tensor, time: Tensor, context: Tensor) -> Tensor:
            x = self.attend(self.first(self.stem(latent), time), context)
            y = self.deep(self.second(self.down(x), time), context)
            y = self.up(fn.interpolate(y, scale_factor=2.0))
            y = self.third(torch.cat([x, y], 1), time)
            return self.last(fn.silu(self.norm(y)))

    samples = {
        "latent": torch.randn(2, 4, 32, 32),
        "time": torch.randn(2, 512),
        "context": torch.randn(2, 77, 768),
    }
    return Net(Denoiser(), samples)


@net("generation")
def dit_block() -> Net:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.LayerNorm(width, elementwise_affine=False)
            self.second = nn.LayerNorm(width, elementwise_affine=False)
            self.attend = nn.MultiheadAttention(width, 6, batch_first=True)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
            )
            self.shift = nn.Linear(width, 6 * width)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            a, b, g, d, e, h = self.shift(fn.silu(c)).unsqueeze(1).chunk(6, -1)
            y = self.first(x) * (1 + b) + a
            x = x + g * self.attend(y, y, y, need_weights=False)[0]
            return x + h * self.mlp(self.second(x) * (1 + e) + d)

    class Dit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(384) for _ in range(6)])

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, c)
            return x

    return Net(Dit(), {"tokens": torch.randn(2, 256, 384), "condition": torch.randn(2, 384)})


# Speech ----------------------------------------------------------------------------------------


@net("speech")
def whisper_encoder() -> Net:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6)
    config.encoder_ffn_dim = 1536
    encoder = WhisperModel(config).encoder
    made = Pick(encoder, "last_hidden_state", ["input_features"])
    return Net(made, {"features": torch.randn(2, 80, 3000)})


@net("speech")
def wav2vec2() -> Net:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(num_hidden_layers=4)
    made = Pick(Wav2Vec2Model(config), "last_hidden_state", ["input_values"])
    return Net(made, {"wave": torch.randn(2, 16000)})


@net("speech")
def conformer() -> Net:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
            feed = [
                nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
                for _ in range(2)
            ]
            self.feed = nn.ModuleList(feed)
            self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
            self.wide = nn.Conv1d(width, 2 * width, 1)
            self.depth = nn.Conv1d(width, width, 31, padding=15, groups=width)
            self.batch, self.point = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.5 * self.feed[0](self.norms[0](x))
            y = self.norms[1](x)
            x = x + self.attend(y, y, y, need_weights=False)[0]
            y = fn.glu(self.wide(self.norms[2](x).transpose(1, 2)), 1)
            x = x + self.point(fn.silu(self.batch(self.depth(y)))).transpose(1, 2)
            x = x + 0.5 * self.feed[1](self.norms[3](x))
            return self.norms[4](x)

    class Conformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(1, 64, 3, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 2), nn.ReLU()
            )
            self.project = nn.Linear(64 * 19, 256)
            self.blocks = nn.Sequential(*[Block(256) for _ in range(6)])

        def forward(self, features: Tensor) -> Tensor:
            x = self.stem(features.unsqueeze(1)).transpose(1, 2).flatten(2)
            return self.blocks(self.project(x))

    return Net(Conformer(), {"features": torch.randn(2, 400, 80)})


@net("speech")
def deep_speech() -> Net:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)),
                nn.BatchNorm2d(32),
                nn.Hardtanh(0, 20),
            )
            self.rnn = nn.GRU(32 * 81, 512, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(1024, 29)

        def forward(self, spectrum: Tensor) -> Tensor:
            x = self.conv(spectrum).flatten(1, 2).transpose(1, 2)
            return self.head(self.rnn(x)[0]).log_softmax(-1)

    return Net(Speech(), {"spectrum": torch.randn(2, 1, 161, 200)})


# Text ------------------------------------------------------------------------------------------


def hugging(name: str, length: int = 128, mask: bool = True, **options: object) -> Net:
    """An encoder or decoder of transformers as it is, mask handling included."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    config.use_cache = False
    model = getattr(transformers, f"{name}Model")(config)
    samples = tokens(length, min(config.vocab_size, 20000), mask)
    return Net(Pick(model, "last_hidden_state", list(samples)), samples)


@net("text")
def bert_base() -> Net:
    return hugging("Bert")


@net("text")
def bert_base_eager() -> Net:
    return hugging("Bert", attn_implementation="eager")


@net("text")
def roberta() -> Net:
    return hugging("Roberta", max_position_embeddings=514)


@net("text")
def albert() -> Net:
    return hugging("Albert", hidden_size=768, num_attention_heads=12, intermediate_size=3072)


@net("text")
def electra_small() -> Net:
    return hugging("Electra")


@net("text")
def mpnet() -> Net:
    return hugging("MPNet", num_hidden_layers=6)


@net("text")
def gpt2() -> Net:
    return hugging("GPT2", mask=False)


@net("text")
def llama_small() -> Net:
    return hugging(
        "Llama",
        mask=False,
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
    )


@net("text")
def t5_encoder() -> Net:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=512, num_layers=6, num_heads=8, d_kv=64, d_ff=2048)
    samples = tokens(128, 20000)
    return Net(Pick(T5EncoderModel(config), "last_hidden_state", list(samples)), samples)


# Recommendation, time series, other ---------------------------------------------------------------


@net("recommendation")
def dlrm() -> Net:
    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(10000, 64) for _ in range(26)])
            self.bottom = nn.Sequential(
                nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 64)
            )
            self.top = nn.Sequential(
                nn.Linear(64 + 351, 512),
                nn.ReLU(),
                nn.Linear(512, 256),
                nn.ReLU(),
                nn.Linear(256, 1),
            )
            self.register_buffer("rows", torch.tril_indices(27, 27, -1)[0])
            self.register_buffer("columns", torch.tril_indices(27, 27, -1)[1])

        def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
            bottom = self.bottom(dense)
            embedded = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
            stacked = torch.stack([bottom, *embedded], 1)
            pairs = (stacked @ stacked.transpose(1, 2))[:, self.rows, self.columns]
            return self.top(torch.cat([bottom, pairs], 1)).sigmoid()

    return Net(Dlrm(), {"dense": torch.randn(2, 13), "sparse": torch.randint(0, 10000, (2, 26))})


@net("recommendation")
def two_tower() -> Net:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(50000, 128)
            self.user = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128))

        def forward(self, user: Tensor, items: Tensor) -> Tensor:
            u = fn.normalize(self.user(user), dim=-1)
            i = fn.normalize(self.items(items), dim=-1)
            return (i @ u.unsqueeze(-1)).squeeze(-1).softmax(-1)

    samples = {"user": torch.randn(2, 256), "items": torch.randint(0, 50000, (2, 500))}
    return Net(Tower(), samples)


class Recurrent(nn.Module):
    """A recurrent network over a series, with a head on its last step."""

    def __init__(self, rnn: nn.Module, width: int) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, 10)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.rnn(series)[0][:, -1])


@net("time series")
def lstm() -> Net:
    rnn = nn.LSTM(64, 256, 2, batch_first=True, bidirectional=True)
    return Net(Recurrent(rnn, 512), {"series": torch.randn(2, 100, 64)})


@net("time series")
def gru() -> Net:
    rnn = nn.GRU(32, 128, 1, batch_first=True)
    return Net(Recurrent(rnn, 128), {"series": torch.randn(2, 200, 32)})


@net("time series")
def tcn() -> Net:
    class Block(nn.Module):
        def __init__(self, inner: int, outer: int, dilation: int) -> None:
            super().__init__()
            self.pad = 2 * dilation
            self.first = nn.Conv1d(inner, outer, 3, dilation=dilation)
            self.second = nn.Conv1d(outer, outer, 3, dilation=dilation)
            self.skip = nn.Conv1d(inner, outer, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(fn.pad(x, (self.pad, 0))).relu()
            return (self.second(fn.pad(y, (self.pad, 0))).relu() + self.skip(x)).relu()

    widths = [8, 64, 64, 64, 64, 64]
    pairs = enumerate(zip(widths, widths[1:], strict=False))
    blocks = [Block(a, b, 2**i) for i, (a, b) in pairs]
    return Net(nn.Sequential(*blocks), {"series": torch.randn(2, 8, 512)})


@net("time series")
def patch_transformer() -> Net:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(16, 128)
            layer = nn.TransformerEncoderLayer(128, 8, 256, activation="gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(128 * 63, 96)

        def forward(self, series: Tensor) -> Tensor:
            x = self.embed(series.unfold(1, 16, 8))
            return self.head(self.encoder(x).flatten(1))

    return Net(Patches(), {"series": torch.randn(2, 512)})


@net("time series")
def spectral_mixer() -> Net:
    """A series forecaster that mixes over time and features with odd sizes everywhere."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Linear(97, 97)
            self.feature = nn.Sequential(nn.Linear(21, 75), nn.GELU(), nn.Linear(75, 21))
            self.scale = nn.Parameter(torch.full((21,), 1 / math.sqrt(2)))
            self.head = nn.Linear(97, 33)

        def forward(self, series: Tensor) -> Tensor:
            x = series + self.time(series.transpose(1, 2)).transpose(1, 2).relu()
            x = x + self.scale * self.feature(x)
            return self.head(x.transpose(1, 2)).transpose(1, 2)

    return Net(Mixer(), {"series": torch.randn(2, 97, 21)})
