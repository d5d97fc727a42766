"""One module per stage of dvc.yaml, run by `python -m tasks.<stage>`. Imports no Prefect."""
