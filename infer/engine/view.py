"""A view of a model: the same weights under tree attention, for the forwards of one runner.

    model                          view
    CausalLM                       CausalLM'      a copy, as what holds a configuration or a gate is
      Layer                          Layer'
        Attention  config              Attention'  config'
          Linear                         Linear   the same

The library's attention reads its implementation from the configuration that all layers share, and a gate
belongs to all layers of an adapter. To change them on the model for one decoder would change what every other
thread computes. So a runner decodes through a view: copies of the modules that hold a configuration or a gate,
themselves or below them; all others are shared. The copies share the dictionaries of parameters, buffers
and hooks as well, so that weights that move, change or are replaced do so in both.
"""

import copy
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from infer.engine.attention import NAME, register
from infer.engine.gate import ProbeGate

OWN = (PreTrainedConfig, ProbeGate)
BOUND = (MethodType, partial)  # a forward that is wrapped, as accelerate does, is bound to its module


def view_of(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a view with tree attention. It follows the model's weights, not a later change of its modules.

    Takes a millisecond for every five layers.
    """
    register()
    model: Any = next(lm.modules())  # `lm` may be a weak proxy, which cannot be copied
    shared = dict[int, Any]()
    _share(model, shared)
    view = copy.deepcopy(model, shared)
    view.config._attn_implementation = NAME
    return view


def _share(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Add to `shared`, by id as `deepcopy` wants it, what a view does not copy of a module and those below.

    Return whether that is the whole module.
    """
    below = [_share(child, shared) for child in module.children()]
    attributes = list(vars(module).values())
    whole = all(below) and not any(isinstance(value, OWN) for value in attributes)
    if whole:
        shared[id(module)] = module
    else:
        for value in attributes:
            if value is not module._modules:
                _share_value(value, shared)
    return whole


def _share_value(value: Any, shared: dict[int, Any]) -> None:
    """Add what a view does not copy of an attribute; of a bound function that is what it is bound to beside
    modules, such as a timer with a lock.
    """
    if isinstance(value, BOUND):
        for part in _bound(value):
            _share_value(part, shared)
    elif not isinstance(value, (*OWN, nn.Module)):
        shared[id(value)] = value


def _bound(function: MethodType | partial[Any]) -> list[Any]:
    """What a bound function is made of."""
    if isinstance(function, MethodType):
        return [function.__self__]
    return [function.func, *function.args, *function.keywords.values(), *vars(function).values()]
