"""checkpoint_engine sends versions of named tensors from one sender to many receivers (docs/checkpoint_engine.md)."""

from checkpoint_engine.base import EVALUATION, RING, Ack, Activation, DeliveryOptions, Draft, Header
from checkpoint_engine.binding_proof import (
    PROOF_VERSION,
    LoraModule,
    binding_probe,
    check_binding,
    proof_tensors,
    tensor_probe,
)
from checkpoint_engine.delivery import Delivery
from checkpoint_engine.digest import weights_digest
from checkpoint_engine.errors import TransferCorrupted, TransferFailed, VersionGone, WeightsMismatch
from checkpoint_engine.incremental import base_digest
from checkpoint_engine.layout import Layout
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver

__all__ = [
    "PROOF_VERSION",
    "EVALUATION",
    "RING",
    "Ack",
    "Activation",
    "Delivery",
    "DeliveryOptions",
    "Draft",
    "Header",
    "Layout",
    "LoraModule",
    "Publisher",
    "Receiver",
    "TransferCorrupted",
    "TransferFailed",
    "VersionGone",
    "WeightsMismatch",
    "base_digest",
    "binding_probe",
    "proof_tensors",
    "check_binding",
    "tensor_probe",
    "weights_digest",
]
