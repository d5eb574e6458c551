"""A released IndexTTS2: GPT, tokenizer, codes; its own package has its classes and its sound.

It needs the extra xtts_v2, whose GPT it has.
"""

CODECS = {"indextts2": "kit.extras.indextts2.codec:IndexTTS2Codec"}
FRONT_ENDS = {"indextts2": "kit.extras.indextts2.codec:Features"}
TOKENIZERS = {"indextts2": "kit.extras.indextts2.tokenizer:IndexTTS2Tokenizer"}
CONDITIONERS = {"indextts2": "kit.extras.indextts2.codec:IndexTTS2Conditioner"}
BASE_MODELS = {"IndexTTS2": "kit.extras.indextts2.base:INDEXTTS2"}
