"""The parts of `finetune_long_document.py`: its command line, document, model, peers, trainers and checkpoints."""
