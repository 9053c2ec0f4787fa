"""The FP8 recipe as a stranger would write it: linear layers of a plain model whose three products are rounded."""

import functools

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn


def scale(x, dim=None):
    top = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return torch.exp2(torch.ceil(torch.log2((top / 448).clamp(min=2.0**-126))))


def rounded(x, s):
    return (x / s).clamp(-448, 448).to(E4M3).float()


class Linear(torch.autograd.Function):
    """is_wide: whether x is the wide factor of the weight's gradient, as the product of a gated unit is."""

    @staticmethod
    def forward(ctx, x, w, is_wide):
        ctx.save_for_backward(x, w)
        ctx.is_wide = is_wide
        x2, w2 = x.flatten(0, -2).float(), w.float()
        sx, sw = scale(x2, 1), scale(w2)
        return ((rounded(x2, sx) @ rounded(w2, sw).t()) * (sx * sw)).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        x2, d, w2 = x.flatten(0, -2).float(), dy.flatten(0, -2).float(), w.float()
        sx, sd, sw = scale(x2, 1), scale(d, 1), scale(w2)
        dx = (rounded(d, sd) @ rounded(w2, sw)) * (sd * sw)
        c = (sx * sd).max().clamp(min=2.0**-120)
        if ctx.is_wide:
            dw = rounded(d * sx / c, 1.0).t() @ rounded(x2, sx)
        else:
            dw = rounded(d, sd).t() @ rounded(x2 * sd / c, 1.0)
        return dx.to(x.dtype).view_as(x), (c * dw).to(w.dtype), None


def emulate(model, layers):
    """Run the linear layers inside these decoder layers by the recipe."""
    for layer in layers:
        for name, module in layer.named_modules():
            if type(module) is nn.Linear:
                wide = name.endswith("down_proj")
                module.forward = functools.partial(_forward, module, wide)
    return model


def _forward(module, is_wide, x):
    y = Linear.apply(x, module.weight, is_wide)
    return y if module.bias is None else y + module.bias
