"""One module per stage of dvc.yaml. `python -m tasks.<stage>` runs it; nothing here knows of Prefect."""
