"""What keeps tensors from filling a module is named, briefly."""

import torch
from torch import nn

from kit.base.tensor_file import describe_mismatch


def test_every_kind_of_fault_is_named():
    with torch.device("meta"):
        wanted = nn.BatchNorm1d(3).state_dict()
    tensors = nn.BatchNorm1d(3).half().state_dict()
    assert describe_mismatch(tensors, wanted) == ""
    del tensors["weight"]
    tensors["bias"] = torch.zeros(4)
    tensors["more"] = torch.zeros(1)
    tensors["num_batches_tracked"] = torch.tensor(1.0)
    assert describe_mismatch(tensors, wanted) == (
        "missing: weight; misshapen: bias (4,), not (3,); unknown: more; "
        "of another type: num_batches_tracked torch.float32"
    )
