"""NeuCodec, a released codec, in the place of one that is trained on the recordings."""

CODECS = {"neucodec": "kit.extras.neucodec.codec:NeuCodec"}
