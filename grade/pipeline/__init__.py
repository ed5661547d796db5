"""What the pipeline's stages run: the fetching of model and text, the base models, papermill, the page of results."""
