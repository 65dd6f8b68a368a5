"""GEPA's arm of prompt_search.py: `gepa.optimize` on the simulated world. Runs in an environment with gepa alone."""

from statistics import fmean

import gepa
from gepa.core.adapter import EvaluationBatch
from prompt_world_client import World, job, worlds


class Adapter:
    propose_new_texts = None

    def __init__(self, world: World) -> None:
        self.world = world

    def evaluate(self, batch, candidate, capture_traces=False):
        results = [self.world.answer(candidate["prompt"], task) for task in batch]
        outputs, scores = [list(each) for each in zip(*results, strict=True)]
        return EvaluationBatch(outputs=outputs, scores=scores, trajectories=results)

    def make_reflective_dataset(self, candidate, eval_batch, components_to_update):
        shown = [{"Generated Outputs": answer, "Feedback": f"score {x:.2f}"} for answer, x in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, shown)


class Silent:
    def log(self, *_, **__):
        pass


def search(world: World, given: dict, seed: int) -> None:
    def stop(state) -> bool:
        means = [fmean(scores.values()) for scores in state.prog_candidate_val_subscores]
        best = state.program_candidates[means.index(max(means))]["prompt"]
        return world.consider(best) or world.spent()

    gepa.optimize(
        {"prompt": given["template"]},
        given["train"],
        given["validation"][: given["gepa_validation"]],
        adapter=Adapter(world),
        reflection_lm=lambda prompt: world.ask("reflector", str(prompt)),
        reflection_minibatch_size=3,
        stop_callbacks=stop,
        logger=Silent(),
        seed=seed,
    )


if __name__ == "__main__":
    given = job()
    for seed, world in enumerate(worlds(given)):
        search(world, given, seed)
        world.report()
