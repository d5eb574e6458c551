"""Where every notebook and command begins: the run, the machine, and what follows from it.

On Colab it installs what is missing there and mounts Google Drive; where KIT_MIRROR names a folder
it brings back what is kept of the run. Imports nothing heavy: what it sets must be set before torch
is loaded.
"""

import os


def start(name: str = "", preset: str = "", use: str = "", settings: dict | None = None):
    """The run `name` on this machine, as an `ActiveRun`; made where it does not exist yet.

    An empty `name` is KIT_RUN's, or "demo". `preset` and `use` are as `open_run` takes them;
    `settings` ({"train": {"lr": 1e-4}}) are laid over both, and kept with the run as `use` is.
    Raises KitError for a name that is no plain folder's, for a preset that is not the run's own,
    and for a setting that there is not.
    """
    wait_patiently()
    from kit.recipes import colab

    if colab.is_colab():
        colab.install_missing()
        colab.keep_on_drive()
    from kit.base.hardware import allow_expandable_segments
    from kit.base.notes import show_plain_notes
    from kit.base.run import run_folder
    from kit.notebook.kernel import plain_errors, print_results
    from kit.recipes.active_run import active_run
    from kit.recipes.keeping import kept_run

    allow_expandable_segments()
    plain_errors()
    show_plain_notes()
    print_results()
    kept = kept_run(run_folder(name))
    return active_run(name, preset, use, settings, kept)


def wait_patiently() -> None:
    """Set how torch's threads wait for each other. Nothing changes once torch was imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two busy cores: do not spin while waiting
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # ... but wait a moment before falling asleep
