"""A released XTTS-v2: its GPT, tokenizer, DVAE, speaker encoder and HiFi-GAN."""

CODECS = {"xtts": "kit.extras.xtts_v2.codec:XTTSCodec"}
FRONT_ENDS = {"xtts": "kit.extras.xtts_v2.codec:XTTSMel"}
TOKENIZERS = {"json": "kit.extras.xtts_v2.tokenizer:XTTSTokenizer"}
BASE_MODELS = {"XTTS-v2": "kit.extras.xtts_v2.base:XTTS_V2"}
