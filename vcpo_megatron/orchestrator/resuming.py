"""Going back to a checkpoint, in two parts: what can refuse it, and then what it changes.

``check``    reads only: the environment's fingerprint, the store's run and age
             then the learner reads and compares its checkpoint (``LearnerLink.loaded``)
``accept``   one transaction of the store, in which newer checkpoints are put away; then the configuration of the
             attempt is recorded and becomes the run's

Whatever is refused before ``accept`` leaves checkpoints, store, metrics and configuration as they were. In ``accept``
newer checkpoints go before the store forgets what they know, so that a crash in between leaves no store that is older
than a checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

from ..config.load import written
from ..config.process import ProcessContext
from ..config.schema import RunConfig
from ..environments.client import EnvironmentClient
from ..run.history import record
from ..run.tasks import RunError
from .store.recorder import Recorder
from .store.resume import ResumePlan
from .store.store import RolloutStore


async def check(
    context: ProcessContext, config: RunConfig, environment: EnvironmentClient, recorder: Recorder
) -> dict[str, Any]:
    """Our state in the checkpoint that the run goes back to, {} for step 0; RunError or StoreError when the data or the
    store are not those of the checkpoint."""
    step = context.resume_step
    if step is None:
        return {}
    state = context.directory.manifest(step).orchestrator
    before, now = state.get("environment"), environment.description.fingerprint
    if before != now:
        section = config.environment
        files = [str(path) for path in (section.data, section.heldout) if path is not None]
        changed = f"the content of {' or '.join(files)}, or the tokenizer" if files else "the tokenizer"
        raise RunError(
            f"the environment is not that of checkpoint step_{step} (fingerprint {before}, now {now}): its "
            f"configuration is the same, so {changed} has changed; restore it, or start a new run"
        )
    await recorder.write(lambda store: store.check_belongs(step, state.get("store")))
    return state


async def accept(context: ProcessContext, config: RunConfig, state: dict[str, Any], recorder: Recorder) -> ResumePlan:
    """Go back to the checkpoint, or to step 0: also after an attempt that died before its first checkpoint."""
    directory, step = context.directory, context.resume_step or 0
    keep = config.checkpoint.resume_partial and config.staleness.lag == "bounded" and config.rollout.engine != "replay"

    def go_back(store: RolloutStore) -> ResumePlan:
        plan = store.resume(step, state.get("store"), keep_partial=keep)
        if context.resume_step is not None and (left := directory.abandon_after(step, context.attempt)):
            names = ", ".join(f"step_{other}" for other in left)
            print(f"newer checkpoints, now in checkpoints/abandoned/attempt_{context.attempt}: {names}", flush=True)
        return plan

    try:
        plan = await recorder.write(go_back)
        directory.make_checkpoints()  # before the history: a run that has one and no such folder has lost it
        record(directory, attempt=context.attempt, step=context.resume_step, values=written(config))
        if directory.proposed.exists():
            os.replace(directory.proposed, directory.resolved)
    except OSError as error:
        raise RunError(f"cannot go back to step {step}: {error.filename}: {error.strerror}") from error
    if plan.buffer or plan.partial or plan.requeue:
        kept = sum(len(group.trajectories) for group in plan.partial)
        missing = sum(len(group.missing) for group in plan.partial)
        begun = sum(len(group.answers) for group in plan.partial)
        print(
            f"resume: {len(plan.buffer)} complete groups are kept, {len(plan.partial)} go on with {kept} "
            f"trajectories and lack {missing}, of which {begun} are begun, {len(plan.requeue)} prompts are sampled "
            "again",
            flush=True,
        )
    return plan
