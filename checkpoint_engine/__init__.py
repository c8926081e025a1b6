"""Versioned tensor transfer with proof of delivery. Knows nothing of RL, diffusion or Ray."""

from checkpoint_engine.base import EVALUATION, RING, Ack, Activation, Draft, Header, ReceiverEndpoint, SenderEndpoint
from checkpoint_engine.binding_proof import CANARY_VERSION, LoraModule, binding_probe, canary_tensors, check_binding
from checkpoint_engine.delivery import Delivery
from checkpoint_engine.digest import base_digest, weights_digest
from checkpoint_engine.errors import EngineError, TransferCorrupted, TransferFailed, VersionGone, WeightsMismatch
from checkpoint_engine.layout import Layout
from checkpoint_engine.object_store import LocalReceiver, LocalSender, ObjectStore, SharedMemoryStore
from checkpoint_engine.outcome import DeliveryOptions, DeliveryStats, Verdict, verdict
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver

__all__ = [
    "CANARY_VERSION",
    "EVALUATION",
    "RING",
    "Ack",
    "Activation",
    "Delivery",
    "DeliveryOptions",
    "DeliveryStats",
    "Draft",
    "EngineError",
    "Header",
    "Layout",
    "LocalReceiver",
    "LocalSender",
    "LoraModule",
    "ObjectStore",
    "Publisher",
    "Receiver",
    "ReceiverEndpoint",
    "SenderEndpoint",
    "SharedMemoryStore",
    "TransferCorrupted",
    "TransferFailed",
    "Verdict",
    "VersionGone",
    "WeightsMismatch",
    "base_digest",
    "binding_probe",
    "canary_tensors",
    "check_binding",
    "verdict",
    "weights_digest",
]
