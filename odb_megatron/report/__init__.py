"""What a run tells: step records, live lines, the final summary.

Pure presentation: takes values, touches no process group and no Megatron global.
"""
