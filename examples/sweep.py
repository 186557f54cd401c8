"""A sweep: Optuna looks for a good learning rate and width, each machine tries other values.

    python sweep.py                  # on one machine, in memory
    barnraise run sweep.py           # on all machines; their agents keep the study

All machines see every result, so each next trial learns from all of them. If a machine is switched off, the
run starts again on the others without the unfinished trials. Finished trials are kept, also for a later run.
"""

import argparse
import os

import optuna
import torch
from torch import nn

import barnraise


def spiral(count):
    points = torch.randn(count, 2)
    arms = (torch.sin(torch.atan2(points[:, 1], points[:, 0]) + 3 * points.norm(dim=1)) > 0).long()
    return points, arms


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--study", default="spiral")
    options.add_argument("--trials", type=int, default=40, help="finished trials, on all machines together")
    options.add_argument("--small", action="store_true")
    given = options.parse_args()
    torch.manual_seed(0)
    (points, arms), (new_points, new_arms) = spiral(4096), spiral(4096)

    def share_of_errors(trial):
        width = trial.suggest_int("width", 4, 128, log=True)
        rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
        torch.manual_seed(0)  # equal values give an equal result on every machine
        model = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        for _ in range(20 if given.small else 200):
            loss = nn.functional.cross_entropy(model(points), arms)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            return (model(new_points).argmax(1) != new_arms).float().mean().item()

    finished = (optuna.trial.TrialState.COMPLETE,)
    study = optuna.create_study(
        storage=barnraise.optuna.storage() if "BARNRAISE_RUN" in os.environ else None,
        study_name=given.study,
        load_if_exists=True,
    )
    trials = 8 if given.small else given.trials
    if len(study.get_trials(states=finished)) < trials:
        limit = optuna.study.MaxTrialsCallback(trials, states=finished)
        study.optimize(share_of_errors, callbacks=[limit])
    best = study.best_trial
    print(
        f"{len(study.get_trials(states=finished))} trials; best: {best.value:.1%} errors with {best.params}"
    )


if __name__ == "__main__":
    main()
