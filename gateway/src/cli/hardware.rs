//! A machine's hardware, and what comes and goes, as the command line names it.

use lease::hardware::{Attach, DiskWanted, Hardware};
use types::{
    units::Mebibytes,
    vm::{DiskModel, HyperV},
};

use super::{
    CliError,
    arguments::{AttachArguments, HardwareArguments, Model},
};

/// Returns the hardware of `arguments`.
pub(super) fn of(arguments: &HardwareArguments) -> Hardware {
    let HardwareArguments { disk_model, hyperv, own_disk_mib, spare_ports, plugged_later } =
        arguments;
    Hardware {
        disk_model: model(*disk_model),
        hyperv: if *hyperv { HyperV::On } else { HyperV::Off },
        disk_mib: own_disk_mib.map(Mebibytes),
        spare_ports: *spare_ports,
        plugged_later: plugged_later.clone(),
    }
}

/// Returns what `arguments` attach, checked.
pub(super) fn attach(arguments: &AttachArguments) -> Result<Attach, CliError> {
    let AttachArguments { machine: _, disk, size_mib, model: looks, content, device } = arguments;
    let wanted = match (device, disk) {
        (Some(address), _) => Attach::Pci { address: *address },
        (None, name) => Attach::Disk(DiskWanted {
            name: name.clone().unwrap_or_default(),
            size_mib: size_mib.map(Mebibytes),
            model: model(*looks),
            content: *content,
        }),
    };
    wanted.check().map_err(|error| CliError::Usage { message: error.to_string() })?;
    Ok(wanted)
}

fn model(model: Model) -> DiskModel {
    match model {
        Model::VirtioBlk => DiskModel::VirtioBlk,
        Model::Nvme => DiskModel::Nvme,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{super::arguments::*, *};

    const MACHINE: &str = "00112233445566778899aabbccddeeff";

    fn attached(words: &[&str]) -> Result<Attach, String> {
        let all = ["holdfast", "machines", "attach", MACHINE].iter().chain(words);
        let arguments = Arguments::try_parse_from(all).map_err(|error| error.to_string())?;
        let Command::Machines { command: MachinesCommand::Attach(wanted) } = arguments.command
        else {
            panic!("another command");
        };
        attach(&wanted).map_err(|error| error.to_string())
    }

    #[test]
    fn a_disk_or_a_device_is_attached() {
        let disk = DiskWanted {
            name: "data".into(),
            size_mib: Some(Mebibytes(8)),
            model: DiskModel::Nvme,
            content: None,
        };
        let words = ["--disk", "data", "--size-mib", "8", "--model", "nvme"];
        assert_eq!(attached(&words), Ok(Attach::Disk(disk)));
        let address = "0000:41:00.0".parse().expect("an address");
        assert_eq!(attached(&["--device", "0000:41:00.0"]), Ok(Attach::Pci { address }));
        assert!(attached(&[]).is_err() && attached(&["--disk", "../x"]).is_err());
        assert!(attached(&["--disk", "a", "--device", "0000:41:00.0"]).is_err());
    }
}
