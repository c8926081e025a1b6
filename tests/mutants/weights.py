"""Mutants: planted faults in the delivery and use of weights, and in the arithmetic of losses."""

from dataclasses import replace
from typing import Any

import torch

from async_flowrl.algorithms.base import detached
from async_flowrl.policies.quantized_layer import FORMATS
from checkpoint_engine.errors import MemberBusy
from tests.mutants.mutation import Mutant, after, nothing, nothing_awaited
from tests.mutants.tickets import FAULTS, HANGS, LOOP, RECEIVER, STALE

WORKER = "async_flowrl.rollout.rollout_worker:RolloutWorker"
WEIGHTS = "async_flowrl.controller.weights:PublishedWeights"
LABEL = "tests.unit.rollout.test_worker:test_a_ticket_is_made_with_one_version_and_labelled_with_it"
BROADCAST = "checkpoint_engine.collective_delivery:CollectiveBroadcast"
FALL_BACKS = "tests.unit.checkpoint_engine.test_engine_fallbacks"
REFEREE = "tests.unit.algorithms.test_algorithm_referee:test_stale_estimators_with_correction_land"
FLOW_GRPO = {"name": "flow_grpo", "fields": {"sde_type": "sde", "noise_level": 0.7}}


def copies_nothing(activate: Any) -> Any:
    def fault(receiver: Any, *version: Any, **slot: str) -> str:
        live = receiver.live.clone()
        digest = activate(receiver, *version, **slot)
        receiver.live.copy_(live)
        return str(digest)

    return fault


def newest_activated(activate: Any) -> Any:
    def fault(receiver: Any, stream: str, version: int, *, slot: str = "ring") -> str:
        newest = max(held for _, held, kind in receiver.held() if kind == slot)
        return str(activate(receiver, stream, newest, slot=slot))

    return fault


def labelled_at_the_end(generate: Any) -> Any:
    def fault(worker: Any, requests: Any) -> Any:
        (report,), *images = generate(worker, requests)
        return [replace(report, version=worker.receiver.held()[-1][1])], *images

    return fault


def only_everybody(notify: Any) -> Any:
    return lambda signal, who=None: notify(signal) if who is None else None


def activate_on_arrival(receiver: Any, header: Any, buffer: Any, slot: str = "ring") -> None:
    receiver.activate(header.stream, header.version, slot=slot)


def two_swapped(live_tensors: Any) -> Any:
    def fault(engine: Any) -> dict[str, Any]:
        tensors = dict(live_tensors(engine))
        one, other = "transformer_blocks.0.attn.to_q.weight", "transformer_blocks.0.attn.to_k.weight"
        return tensors | {one: tensors[other], other: tensors[one]}

    return fault


def none_idle(gradient_norms: Any) -> Any:
    return lambda optimizer: {name: max(norm, 1e-30) for name, norm in gradient_norms(optimizer).items()}


def busy_is_nobody(broadcast: Any) -> Any:
    async def fault(*call: Any) -> Any:
        try:
            return await broadcast(*call)
        except MemberBusy:
            return {}

    return fault


WEIGHT_FAULTS = (
    Mutant(
        "weights are acknowledged before they are verified",
        {f"{RECEIVER}._check_digests": nothing},
        f"{FAULTS}:test_damaged_weights_are_sent_again",
        arguments={"number": 3, "what": "corrupt"},
    ),
    Mutant(
        "stale adapter: activation copies nothing",
        {f"{RECEIVER}.activate": copies_nothing},
        f"{LOOP}:test_live_bytes_are_what_the_label_says",
        arguments=STALE,
        raises=("WeightsMismatch", "AssertionError"),
    ),
    Mutant(
        "newest weights instead of those the ticket names",
        {f"{RECEIVER}.activate": newest_activated},
        f"{LOOP}:test_the_weights_do_not_depend_on_workers_or_delays",
        arguments={"mode": "fully_async", "workers": 4},
        raises=("Refused", "AssertionError"),
    ),
    Mutant("the label is taken when the ticket is finished", {f"{WORKER}.generate": labelled_at_the_end}, LABEL),
    Mutant(
        "weights arrive in the live tensors at once",
        {f"{RECEIVER}.retain": after(lambda receiver, header, storage, slot: receiver.live.copy_(storage))},
        LABEL,
    ),
    Mutant(
        "a replacement serves without proof",
        {f"{WEIGHTS}.prove": nothing_awaited},
        f"{FAULTS}:test_a_worker_that_computes_with_other_modules_never_serves",
        arguments={"name": "rollout-0.1"},
        raises=("Failed",),
    ),
    Mutant(
        "a lost acknowledgement: nobody is woken",
        {"separation.supervise:Signal.notify": only_everybody},
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
        raises=HANGS,
    ),
    Mutant(
        "publishing waits for the delivery",
        {f"{WEIGHTS}.publish": after(lambda weights, version: weights.delivery.drain())},
        f"{LOOP}:test_one_slow_acknowledgement_stalls_one_worker_only",
    ),
    Mutant(
        "a version published while a member is busy counts as a failed broadcast",
        {f"{BROADCAST}.__call__": busy_is_nobody},
        f"{FALL_BACKS}:test_while_every_receiver_is_busy_nothing_has_failed",
    ),
    Mutant(
        "the group of a failed broadcast stays",
        {f"{BROADCAST}._give_up": nothing_awaited},
        f"{FALL_BACKS}:test_an_answer_within_its_limit_is_in_time_and_one_after_it_costs_one_version",
        arguments={"late": 0.001, "fallbacks": 1},
    ),
    Mutant(
        "two parameters of one shape take each other's weights",
        {"async_flowrl.rollout.diffusers_engine:DiffusersEngine.live_tensors": two_swapped},
        "tests.unit.training.test_full_weights:test_the_proof_is_found_under_the_networks_own_names",
        raises=("WeightsMismatch",),
    ),
    Mutant(
        "the weights that arrive go live in the middle of a ticket",
        {f"{RECEIVER}.receive": after(activate_on_arrival)},
        "tests.unit.rollout.test_worker:test_weights_that_arrive_in_a_denoising_step_cost_no_image_and_change_none",
    ),
)


def without_root(diffusion: Any) -> Any:
    def fault(x: Any, velocity: Any, s: Any, s_next: Any, g: Any) -> Any:
        mean, std = diffusion(x, velocity, s, s_next, g)
        return mean, std / torch.sqrt(s - s_next)

    return fault


def corrected_to_now(corrected: Any) -> Any:
    return lambda loss, batch, now, proximal, behaviour: corrected(loss, batch, now, proximal, detached(now))


def detached_branch(guide: Any) -> Any:
    return lambda policy, positive, negative, scale: guide(policy, positive, negative.detach(), scale)


def other_scales(loaded: Any) -> Any:
    loadings = []

    def fault(quantizer: Any, *arguments: Any) -> Any:
        if (network := loaded(quantizer, *arguments)) is not None:
            loadings.append(network)
            scales = (tensor for name, tensor in network.named_parameters() if name.endswith(".scale"))
            next(scales).data.mul_(len(loadings))
        return network

    return fault


def kept_weights(save: Any) -> Any:
    def fault(context: Any, x: Any, codes: Any, scale: Any, bias: Any, table: Any, form: str) -> Any:
        context.save_for_backward(FORMATS[form].decode(codes, scale, table), scale, table)
        return torch.nn.functional.linear(x, FORMATS[form].decode(codes, scale, table), bias)

    return fault


LAYERS = "tests.unit.policies.test_quantized"


def texts_alone(identity: Any) -> Any:
    return lambda wording: identity(getattr(wording, "text", wording))


TENSOR_FAULTS = (
    Mutant(
        "momentum moves an expert that a step did not train",
        {"async_flowrl.training.optimizer:Optimizer.gradient_norms": none_idle},
        "tests.unit.policies.test_experts:test_an_expert_without_gradient_is_left_as_it_is_and_counts_its_own_steps",
    ),
    Mutant(
        "two processes have the same codes and other scales",
        {"async_flowrl.policies.quantizer:Quantizer.loaded": other_scales},
        f"{LAYERS}:test_every_process_of_every_family_has_the_same_bits",
        arguments={"family": "qwen_image"},
    ),
    Mutant(
        "a quantised layer keeps its weights for the backward pass",
        {"async_flowrl.policies.quantized_layer:_Product.forward": kept_weights},
        f"{LAYERS}:test_a_layer_is_small_near_its_weights_and_keeps_no_others",
        arguments={"name": "nf4", "dtype": torch.bfloat16},
    ),
    Mutant(
        "the text alone names an embedding, not its images",
        {"async_flowrl.rollout.text_encoder:identity": texts_alone},
        "tests.unit.data.test_condition_images:test_the_bytes_are_the_identity_and_are_read_once",
    ),
    Mutant("missing √h", {"async_flowrl.algorithms.sde:diffusion": without_root}, REFEREE, arguments=FLOW_GRPO),
    Mutant(
        "wrong old log-prob: the current policy's",
        {"async_flowrl.algorithms.policy_gradient:PolicyGradient._corrected": corrected_to_now},
        REFEREE,
        arguments=FLOW_GRPO,
    ),
    Mutant(
        "detached CFG branch",
        {"async_flowrl.policies.qwen_image:QwenImagePolicy._guide": detached_branch},
        "tests.unit.policies.test_qwen_image:test_gradients_flow_through_both_branches",
    ),
)
