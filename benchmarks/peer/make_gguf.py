"""A GGUF file with the same weights in bfloat16: python make_gguf.py SOURCE.gguf TARGET.gguf"""

import sys
from pathlib import Path

import gguf
import numpy as np

source, target = Path(sys.argv[1]), Path(sys.argv[2])
reader = gguf.GGUFReader(source)
architecture = reader.fields["general.architecture"].contents()
new = target.with_suffix(".new")
writer = gguf.GGUFWriter(new, architecture)
for name, field in reader.fields.items():
    if name.startswith("GGUF.") or name == "general.architecture":
        continue
    value = int(gguf.LlamaFileType.MOSTLY_BF16) if name == "general.file_type" else field.contents()
    kind = field.types[0]
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, value, kind, inner)
for tensor in reader.tensors:
    weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if weights.ndim > 1:
        data = gguf.quantize(weights, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(tensor.name, weights)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
new.rename(target)
print(target, target.stat().st_size)
