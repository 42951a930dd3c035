//! What a guest says of its GPUs.
#![no_main]

use types::gpu::{GpuReading, MAX_GPUS, MAX_TEXT};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(reading) = GpuReading::parse(bytes) else { return };
    assert!(reading.gpus.len() <= MAX_GPUS);
    for gpu in &reading.gpus {
        assert!(gpu.name.len() <= MAX_TEXT && gpu.name.is_ascii());
    }
    let lines = agent::gpu::show::lines(&reading);
    assert!(lines.iter().all(|line| line.bytes().all(|byte| (0x20..0x7f).contains(&byte))));
    let mut out = agent::local::exposition::Exposition::default();
    agent::gpu::show::metrics(&mut out, &[agent::gpu::show::Told { machine: "", reading: &reading }]);
    let _ = out.finish();
    let again = serde_json::to_vec(&reading).expect("written");
    assert_eq!(GpuReading::parse(&again).as_ref(), Ok(&reading));
});
