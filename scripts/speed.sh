#!/usr/bin/env bash
# Everything that docs/speed.md shows, on this machine: a calibrated checkpoint in FOLDER (default .speed; kept for the next
# run), what a step costs, engines side by side, what formats change. Writes FOLDER/*.json and peers-*.svg.
# THREADS, FORMATS, ROUNDS and TOKENS may be set; an idle machine is needed for figures that mean something.
EXTRA="[test,peers]" source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
FOLDER="${1:-.speed}" THREADS="${THREADS:-1}" FORMATS="${FORMATS:-all}" ROUNDS="${ROUNDS:-7}" TOKENS="${TOKENS:-128}"
CHECKPOINT="$FOLDER/qwen3.5-0.8b" BIN="$VENV/bin/foreglance"
mkdir -p "$FOLDER"
[[ -f "$CHECKPOINT/calibration.json" ]] || "$BIN" bench make-checkpoint --shape qwen3.5-0.8b --acceptance 0.7 --out "$CHECKPOINT"
[[ -f "$FOLDER/mmproj.gguf" ]] || for type in bf16 q8_0; do
    "$BIN" export-gguf --model "$CHECKPOINT" --out "$FOLDER/model-$type.gguf" --mmproj "$FOLDER/mmproj.gguf" --type "$type"
done
measure() { # name, then the arguments of foreglance
    "$BIN" "${@:2}" --json > "$FOLDER/$1.json" && echo "$FOLDER/$1.json"
}
measure speed bench speed --checkpoint "$CHECKPOINT" --weights "$FORMATS" --threads "$THREADS" --rounds "$ROUNDS" \
    --contexts 256,1024,4096,8192 --slots 1,2,4,8
for type in bf16 q8_0; do
    measure "peers-$type" bench peers --checkpoint "$CHECKPOINT" --weights "$FORMATS" --threads "${THREADS%%,*}" \
        --gguf "$FOLDER/model-$type.gguf" --mmproj "$FOLDER/mmproj.gguf" --rounds "$ROUNDS" --max-tokens "$TOKENS" \
        --prompts 1 --figure "$FOLDER/peers-$type.svg"
done
for model in tiny-qwen tiny-gemma tiny-step; do
    measure "peers-$model" bench peers --checkpoint "$model" --weights "$FORMATS" --threads "${THREADS%%,*}" \
        --rounds "$ROUNDS" --max-tokens "$TOKENS" --figure "$FOLDER/peers-$model.svg"
done
measure quality bench quality --model tiny-qwen --weights "$FORMATS"
