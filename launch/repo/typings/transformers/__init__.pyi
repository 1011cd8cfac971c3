"""What pyright reads in place of transformers' own list of names, which imports each of its thousands of modules.

Modules of transformers, and what is imported here, keep their own types. Any other name of the package itself is Any.
"""

from typing import Any

from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.trainer import Trainer as Trainer
from transformers.trainer_utils import set_seed as set_seed

def __getattr__(name: str) -> Any: ...
