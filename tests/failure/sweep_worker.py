"""Process of a sweep: finishes a number of trials of a study, and prints the number of each finished one."""

from __future__ import annotations

import sys
import time

import optuna

import barnraise


def main() -> None:
    name, trials, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=barnraise.optuna.storage(timeout_s=120.0),
        study_name=name,
        sampler=optuna.samplers.RandomSampler(),
        load_if_exists=True,
    )

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -1.0, 1.0)
        trial.set_user_attr("twice", 2 * x)
        trial.report(x, 0)
        print(f"begin {trial.number}", flush=True)
        time.sleep(pause_s)
        return x * x

    def finished(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        print(f"finish {trial.number} {trial.params['x']!r}", flush=True)

    study.optimize(objective, n_trials=trials, callbacks=[finished])


if __name__ == "__main__":
    main()
